#include "search/blocks.h"

#include <algorithm>
#include <utility>

namespace dynapipe {

int64_t work_of(const MicroBatches& block) {
    int64_t work = 0;
    for (const MicroBatch* batch : block) work += batch->work;
    return work;
}

MicroBatches joined(const Blocks& blocks) {
    MicroBatches order;
    for (const MicroBatches& block : blocks) order.insert(order.end(), block.begin(), block.end());
    return order;
}

std::vector<MicroBatches> spread(Blocks blocks, size_t replicas) {
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const MicroBatches& a, const MicroBatches& b) { return work_of(a) < work_of(b); });
    std::vector<int64_t> load(replicas, 0);
    std::vector<Blocks> its(replicas);
    for (size_t i = blocks.size(); i-- > 0;) {
        const size_t r = std::min_element(load.begin(), load.end()) - load.begin();
        load[r] += work_of(blocks[i]);
        its[r].push_back(std::move(blocks[i]));
    }
    std::vector<MicroBatches> orders;
    for (Blocks& of_replica : its) {
        std::reverse(of_replica.begin(), of_replica.end());
        orders.push_back(joined(of_replica));
    }
    return orders;
}

Blocks hill(const Blocks& blocks) {
    Blocks order;
    for (size_t i = blocks.size(); i-- > 0;)
        if (i % 2 == 0) order.push_back(blocks[i]);
    for (size_t i = 1; i < blocks.size(); i += 2) order.push_back(blocks[i]);
    return order;
}

std::vector<MicroBatches> orders_of_padded(const MicroBatches& batches) {
    std::vector<MicroBatches> orders{batches, {batches.rbegin(), batches.rend()}, {}, batches};
    for (size_t i = 0; i < batches.size(); i += 2) orders[2].push_back(batches[i]);
    for (size_t i = batches.size() / 2 * 2; i > 0; i -= 2) orders[2].push_back(batches[i - 1]);
    std::sort(orders[3].begin(), orders[3].end(),
              [](const MicroBatch* a, const MicroBatch* b) { return a->samples[0] < b->samples[0]; });
    return orders;
}

Blocks merged_hills(const Blocks& blocks, size_t modes) {
    std::vector<std::pair<int64_t, const MicroBatches*>> placed;  // (place in 2^20ths, block)
    std::vector<Blocks> hills;
    for (size_t mode = 0; mode < modes; ++mode) {
        Blocks its;
        for (const MicroBatches& block : blocks)
            if (block[0]->modes[0] == mode) its.push_back(block);
        hills.push_back(hill(its));
    }
    for (const Blocks& order : hills)
        for (size_t i = 0; i < order.size(); ++i)
            placed.emplace_back(static_cast<int64_t>((2 * i + 1) << 20) / static_cast<int64_t>(order.size()),
                                &order[i]);
    std::stable_sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    Blocks order;
    for (const auto& [place, block] : placed) order.push_back(*block);
    return order;
}

}  // namespace dynapipe
