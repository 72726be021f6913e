#include "search/chains.h"

#include <algorithm>
#include <numeric>

namespace dynapipe {

Chains::Chains(const Problem& problem) : problem_(problem) {
    for (size_t sample = 0; sample < problem.chains.size(); ++sample) {
        const int32_t chain = problem.chains[sample];
        if (chain < 0) continue;
        if (chain == static_cast<int32_t>(first_.size())) {
            first_.push_back(sample);
            count_.push_back(0);
        }
        ++count_[chain];
    }
}

bool Chains::hold(const MicroBatches& batches) {
    seen_.assign(first_.size(), 0);
    for (const MicroBatch* batch : batches)
        for (int32_t piece : batch->pieces) {
            const int32_t chain = problem_.chains[piece];
            if (piece != first_[chain] + seen_[chain]++) return false;
        }
    for (size_t chain = 0; chain < seen_.size(); ++chain)
        if (seen_[chain] != 0 && seen_[chain] != count_[chain]) return false;
    return true;
}

int32_t Chains::root(int32_t at) {
    while (parent_[at] != at) at = parent_[at] = parent_[parent_[at]];
    return at;
}

// The first micro-batch of every bundle is its root.
void Chains::unite(const MicroBatches& batches) {
    parent_.resize(batches.size());
    std::iota(parent_.begin(), parent_.end(), 0);
    of_chain_.assign(first_.size(), -1);
    for (size_t at = 0; at < batches.size(); ++at)
        for (int32_t piece : batches[at]->pieces) {
            int32_t& before = of_chain_[problem_.chains[piece]];
            if (before >= 0) {
                const int32_t one = root(before), other = root(at);
                parent_[std::max(one, other)] = std::min(one, other);
            }
            before = at;
        }
}

const std::vector<int32_t>& Chains::turned(const MicroBatches& batches) {
    turned_.clear();
    if (std::all_of(batches.begin(), batches.end(), [](const MicroBatch* batch) { return batch->pieces.empty(); }))
        return turned_;
    unite(batches);
    turned_.resize(batches.size());
    last_.assign(batches.size(), -1);  // by root, the last place of the bundle that is not taken yet
    before_.resize(batches.size());
    for (size_t at = 0; at < batches.size(); ++at) {
        int32_t& last = last_[root(at)];
        before_[at] = last;
        last = at;
    }
    for (size_t at = 0; at < batches.size(); ++at) {
        int32_t& last = last_[root(at)];
        turned_[at] = last;
        last = before_[last];
    }
    return turned_;
}

std::vector<size_t> Chains::bundle(const MicroBatches& batches, size_t at) {
    if (batches[at]->pieces.empty()) return {at};
    unite(batches);
    std::vector<size_t> places;
    const int32_t its = root(at);
    for (size_t other = 0; other < batches.size(); ++other)
        if (root(other) == its) places.push_back(other);
    return places;
}

std::vector<MicroBatches> Chains::blocks(const MicroBatches& batches) {
    std::vector<MicroBatches> blocks;
    if (first_.empty()) {
        for (const MicroBatch* batch : batches) blocks.push_back({batch});
        return blocks;
    }
    unite(batches);
    std::vector<int32_t> block(batches.size(), -1);
    for (size_t at = 0; at < batches.size(); ++at) {
        int32_t& its = block[root(at)];
        if (its < 0) {
            its = blocks.size();
            blocks.emplace_back();
        }
        blocks[its].push_back(batches[at]);
    }
    return blocks;
}

}  // namespace dynapipe
