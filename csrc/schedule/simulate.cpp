#include "schedule/simulate.h"

#include <algorithm>

#include "schedule/transfers.h"

#include "checks.h"

namespace dynapipe {

Simulation simulate(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order,
                    const std::vector<int64_t>* most_idle) {
    if (!shape.transfers.are_plain()) return simulate_transfers(shape, costs, order);
    const int64_t stages = shape.stages, chunks = shape.chunks, last = shape.virtual_stages() - 1;
    const int64_t passes = order.size() / stages;
    constexpr int64_t kUnknown = -1;
    Simulation run;
    run.start.assign(order.size(), 0);
    run.end.assign(order.size(), 0);
    std::vector<int64_t> free(stages, 0), idle(stages, 0);
    std::vector<int64_t>& position = run.position;
    position.assign(stages, 0);
    // When a forward's input is there, a backward's gradient, and what a first half leaves to the second.
    std::vector<int64_t> input_ready(costs.size() * (last + 1), kUnknown), gradient_ready = input_ready,
                                                                           weight_ready = input_ready;
    for (size_t row = 0; row < costs.size(); ++row) input_ready[row * (last + 1)] = 0;

    std::vector<int64_t> awake(stages);  // a queue of stages that may be able to go on; each in it at most once
    std::vector<bool> queued(stages, true);
    for (int64_t stage = 0; stage < stages; ++stage) awake[stage] = stages - 1 - stage;
    const auto wake = [&](int64_t stage) {
        if (!queued[stage]) awake.push_back(stage);
        queued[stage] = true;
    };
    int64_t left = order.size() - std::count(order.begin(), order.end(), kNoPass);
    while (!awake.empty()) {
        const int64_t stage = awake.back();
        awake.pop_back();
        queued[stage] = false;
        while (position[stage] < passes) {
            const int64_t step = stage * passes + position[stage];
            const Pass pass = order[step];
            if (pass == kNoPass) break;
            const PassKind kind = static_cast<PassKind>(pass % kPassKinds);
            const bool backward = kind != kForwardPass;
            const int64_t row = pass / (kPassKinds * chunks), v = pass / kPassKinds % chunks * stages + stage;
            const int64_t at = row * (last + 1) + v;
            const int64_t ready = (!backward ? input_ready : kind == kWeightPass ? weight_ready : gradient_ready)[at];
            if (ready == kUnknown) break;
            const PassCosts& cost = costs[row];
            const int64_t start = std::max(free[stage], ready);
            const int64_t end = start + cost.time(kind, v);
            idle[stage] += start - free[stage];
            if (most_idle && idle[stage] > (*most_idle)[stage]) {
                run.stalled = true;
                return run;
            }
            run.start[step] = start;
            run.end[step] = free[stage] = end;
            if (kind == kInputPass) weight_ready[at] = end;
            if (!backward && v == last) gradient_ready[at] = end;
            if (kind != kWeightPass && (backward ? v > 0 : v < last)) {
                const int64_t duration = cost(backward ? kBackwardTransferNs : kForwardTransferNs, v);
                (backward ? gradient_ready[at - 1] : input_ready[at + 1]) = end + duration;
                wake((backward ? v - 1 : v + 1) % stages);
            }
            ++position[stage];
            --left;
            run.makespan = std::max(run.makespan, end);
        }
    }
    run.stalled = left > 0;
    return run;
}

}  // namespace dynapipe
