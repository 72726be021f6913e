#include "noise.h"

#include <algorithm>

namespace dynapipe {
namespace {

constexpr int64_t kSpread = 307;  // passes take up to 30% more or less

}  // namespace

NoisyReplay::NoisyReplay(const PipelineShape& shape) : shape_(shape), ranks_(shape.stages) {
    for (uint64_t draw = 0; draw < kNoiseDraws; ++draw) draws_.push_back({Random(draw), {}});
}

int64_t NoisyReplay::total(const std::vector<const PassCosts*>& costs, const std::vector<uint8_t>& forwards) {
    input_ready_.resize(shape_.stages * costs.size());
    gradient_ready_.resize(shape_.stages * costs.size());
    int64_t sum = 0;
    for (Draw& draw : draws_) {
        while (draw.factors.size() < 2 * shape_.stages * costs.size())
            draw.factors.push_back(static_cast<int32_t>(1024 - kSpread + draw.random.below(2 * kSpread + 1)));
        sum += makespan(costs, forwards, draw.factors);
    }
    return sum;
}

int64_t NoisyReplay::makespan(const std::vector<const PassCosts*>& costs, const std::vector<uint8_t>& forwards,
                              const std::vector<int32_t>& factors) {
    const int64_t ranks = shape_.stages, count = costs.size();
    const int64_t passes = count * (shape_.forward_only ? 1 : 2);
    std::fill(ranks_.begin(), ranks_.end(), Rank{0, 0, 0});
    std::fill_n(input_ready_.begin(), count, 0);
    for (int64_t left = passes * ranks; left > 0;) {
        for (int64_t s = 0; s < ranks; ++s) {
            Rank& rank = ranks_[s];
            while (rank.forwards + rank.backwards < passes) {
                if (forwards[s * passes + rank.forwards + rank.backwards]) {
                    const int64_t k = rank.forwards;
                    if (s > 0 && k >= ranks_[s - 1].forwards) break;
                    const int64_t time = costs[k]->forward[s] * factors[2 * (k * ranks + s)] / 1024;
                    rank.free = std::max(rank.free, input_ready_[s * count + k]) + time;
                    if (s + 1 < ranks) input_ready_[(s + 1) * count + k] = rank.free + costs[k]->forward_transfer[s];
                    ++rank.forwards;
                } else {
                    const int64_t k = rank.backwards;
                    if (k >= (s + 1 < ranks ? ranks_[s + 1].backwards : rank.forwards)) break;
                    const int64_t time = costs[k]->backward[s] * factors[2 * (k * ranks + s) + 1] / 1024;
                    const int64_t ready = s + 1 < ranks ? gradient_ready_[s * count + k] : 0;
                    rank.free = std::max(rank.free, ready) + time;
                    if (s > 0) gradient_ready_[(s - 1) * count + k] = rank.free + costs[k]->backward_transfer[s];
                    ++rank.backwards;
                }
                --left;
            }
        }
    }
    int64_t makespan = 0;
    for (const Rank& rank : ranks_) makespan = std::max(makespan, rank.free);
    return makespan;
}

}  // namespace dynapipe
