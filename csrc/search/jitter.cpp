#include "search/jitter.h"

#include <algorithm>

namespace dynapipe {
namespace {

constexpr int64_t kUnit = 1024;   // of factors of times
constexpr int64_t kSpread = 307;  // passes take up to 30% more or less

}  // namespace

JitteredReplay::JitteredReplay(const PipelineShape& shape) : shape_(shape), stages_(shape.stages) {
    for (uint64_t draw = 0; draw < kJitterDraws; ++draw) draws_.push_back({Random(draw), {}});
}

int64_t JitteredReplay::total(const std::vector<PassCosts>& costs, const std::vector<uint8_t>& kinds,
                              const std::vector<int32_t>& turned) {
    input_ready_.resize(shape_.stages * costs.size());
    gradient_ready_.resize(shape_.stages * costs.size());
    int64_t sum = 0;
    for (Draw& draw : draws_) {
        while (draw.factors.size() < 2 * shape_.stages * costs.size())
            draw.factors.push_back(static_cast<int32_t>(kUnit - kSpread + draw.random.below(2 * kSpread + 1)));
        sum += makespan(costs, kinds, turned, draw.factors);
    }
    return sum;
}

int64_t JitteredReplay::makespan(const std::vector<PassCosts>& costs, const std::vector<uint8_t>& kinds,
                                 const std::vector<int32_t>& turned, const std::vector<int32_t>& factors) {
    const int64_t stages = shape_.stages, count = costs.size(), width = kinds.size() / stages;
    std::fill(stages_.begin(), stages_.end(), Stage{0, 0, 0, 0, 0});
    std::fill_n(input_ready_.begin(), count, 0);
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t s = 0; s < stages; ++s) {
            Stage& stage = stages_[s];
            for (; stage.passes < width; ++stage.passes) {
                const PassKind kind = static_cast<PassKind>(kinds[s * width + stage.passes]);
                if (kind == kPassKinds) break;
                const auto at = [&](int64_t place) { return turned.empty() ? place : int64_t{turned[place]}; };
                const auto run = [&](int64_t k, int64_t ready) {
                    const int64_t factor = factors[2 * (k * stages + s) + (kind != kForwardPass)];
                    stage.free = std::max(stage.free, ready) + costs[k].time(kind, s) * factor / kUnit;
                };
                if (kind == kForwardPass) {
                    const int64_t k = stage.forwards;
                    if (s > 0 && k >= stages_[s - 1].forwards) break;
                    run(k, input_ready_[s * count + k]);
                    if (s + 1 < stages)
                        input_ready_[(s + 1) * count + k] = stage.free + costs[k](kForwardTransferNs, s);
                    ++stage.forwards;
                } else if (kind == kWeightPass) {
                    while (costs[at(stage.weights)](kWeightNs, s) == 0) ++stage.weights;
                    run(at(stage.weights++), 0);
                } else {
                    const int64_t place = stage.backwards, k = at(place);
                    if (s + 1 < stages ? place >= stages_[s + 1].backwards : k >= stage.forwards) break;
                    run(k, s + 1 < stages ? gradient_ready_[s * count + k] : 0);
                    if (s > 0) gradient_ready_[(s - 1) * count + k] = stage.free + costs[k](kBackwardTransferNs, s);
                    ++stage.backwards;
                }
                moved = true;
            }
        }
    }
    int64_t makespan = 0;
    for (const Stage& stage : stages_) makespan = std::max(makespan, stage.free);
    return makespan;
}

}  // namespace dynapipe
