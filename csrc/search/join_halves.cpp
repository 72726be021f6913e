#include "search/join_halves.h"

#include <algorithm>

#include "costs/memory.h"
#include "schedule/simulate.h"

namespace dynapipe {
namespace {

constexpr int64_t kBudget = 256'000;  // micro-batches on virtual stages that are simulated, over all trials

// A stage that has joined halves takes other messages while others wait, so what stages hold may be more.
bool fits(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order) {
    const std::vector<int64_t> peaks = peak_memory(shape, costs, order);
    return *std::max_element(peaks.begin(), peaks.end()) <= shape.memory_limit;
}

void join(const PipelineShape& shape, const MicroBatches& batches, std::vector<Pass>& order) {
    if (batches.empty()) return;
    std::vector<PassCosts> costs;
    for (const MicroBatch* batch : batches) costs.push_back(batch->costs());
    const Simulation base = simulate(shape, costs, order);
    const int64_t makespan = base.makespan, width = order.size() / shape.stages;
    std::vector<int64_t> most_idle(shape.stages, makespan);  // for no longer a time
    for (size_t i = 0; i < order.size(); ++i) most_idle[i / width] -= base.end[i] - base.start[i];
    const int64_t simulated = static_cast<int64_t>(batches.size()) * shape.virtual_stages();
    const int64_t trials = kBudget / simulated / shape.stages;  // of each stage
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
            const Simulation run = simulate(shape, costs, order, &most_idle);
            if (!run.stalled && run.makespan <= makespan && fits(shape, costs, order)) continue;
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
