#include "join_halves.h"

#include <algorithm>

#include "simulate.h"

namespace dynapipe {
namespace {

constexpr int64_t kBudget = 1'000'000;  // micro-batches on chunks that are simulated, over all trials

void join(const PipelineShape& shape, const MicroBatches& batches, std::vector<Pass>& order) {
    if (batches.empty()) return;
    std::vector<PassCosts> costs;
    for (const MicroBatch* batch : batches) costs.push_back(*batch->costs);
    const Simulation base = simulate(shape, costs, order, false);
    const int64_t makespan = base.makespan, width = order.size() / shape.stages;
    std::vector<int64_t> most_idle(shape.stages, makespan);  // for no longer a time
    for (size_t i = 0; i < order.size(); ++i) most_idle[i / width] -= base.end[i] - base.start[i];
    const int64_t trials = kBudget / (static_cast<int64_t>(batches.size()) * shape.chunks * shape.stages);
    for (int64_t s = 0; s < shape.stages; ++s) {
        const auto begin = order.begin() + s * width, end = begin + width;
        int64_t left = trials;
        for (auto first = begin; first != end && *first != kNoPass && left > 0; ++first) {
            if (*first % kPassKinds != kInputPass) continue;
            --left;
            const auto second = std::find(first, end, *first + kWeightPass - kInputPass);
            const Pass half = *second;
            *first -= kInputPass - kBackwardPass;
            std::rotate(second, second + 1, end);
            end[-1] = kNoPass;
            const Simulation run = simulate(shape, costs, order, false, &most_idle);
            if (!run.stalled && run.makespan <= makespan) continue;
            *first += kInputPass - kBackwardPass;
            end[-1] = half;
            std::rotate(second, end - 1, end);
        }
    }
}

}  // namespace

void join_halves(const Problem& problem, Found& found) {
    if (problem.division != Division::kAuto) return;
    for (size_t r = 0; r < found.orders.size(); ++r)
        join(problem.pipeline, found.replicas[r].micro_batches, found.orders[r]);
}

}  // namespace dynapipe
