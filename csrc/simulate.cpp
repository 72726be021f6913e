#include "simulate.h"

#include <algorithm>

#include "checks.h"

namespace dynapipe {

Simulation simulate(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order,
                    bool queue_links) {
    const int64_t ranks = shape.stages, chunks = shape.chunks, last = shape.virtual_stages() - 1;
    const int64_t passes = order.size() / ranks;
    constexpr int64_t kUnknown = -1;
    Simulation run;
    run.start.assign(order.size(), 0);
    run.end.assign(order.size(), 0);
    run.peak = shape.model_state;
    std::vector<int64_t> held = shape.model_state, free(ranks, 0), position(ranks, 0), link_free(2 * ranks, 0);
    std::vector<int64_t> input_ready(costs.size() * (last + 1), kUnknown), gradient_ready = input_ready;
    for (size_t row = 0; row < costs.size(); ++row) input_ready[row * (last + 1)] = 0;

    std::vector<int64_t> awake(ranks);  // a queue of ranks that may be able to go on; each in it at most once
    std::vector<bool> queued(ranks, true);
    for (int64_t rank = 0; rank < ranks; ++rank) awake[rank] = ranks - 1 - rank;
    const auto wake = [&](int64_t rank) {
        if (!queued[rank]) awake.push_back(rank);
        queued[rank] = true;
    };
    int64_t left = order.size();
    while (!awake.empty()) {
        const int64_t rank = awake.back();
        awake.pop_back();
        queued[rank] = false;
        while (position[rank] < passes) {
            const int64_t step = rank * passes + position[rank];
            const Pass pass = order[step];
            const bool backward = pass & 1;
            const int64_t row = pass / (2 * chunks), stage = pass / 2 % chunks * ranks + rank;
            const int64_t at = row * (last + 1) + stage;
            const int64_t ready = backward ? gradient_ready[at] : input_ready[at];
            if (ready == kUnknown) break;
            const PassCosts& cost = costs[row];
            const int64_t start = std::max(free[rank], ready);
            const int64_t end = start + (backward ? cost.backward : cost.forward)[stage];
            run.start[step] = start;
            run.end[step] = free[rank] = end;
            if (backward) held[rank] -= cost.stored[stage];
            if (!backward || shape.peak_covers_backward)
                run.peak[rank] = std::max(run.peak[rank], held[rank] + cost.peak[stage]);
            if (!backward) {
                if (!shape.forward_only) held[rank] += cost.stored[stage];
                if (stage == last) gradient_ready[at] = end;
            }
            if (backward ? stage > 0 : stage < last) {
                const int64_t duration = (backward ? cost.backward_transfer : cost.forward_transfer)[stage];
                int64_t depart = end;
                if (queue_links) {
                    int64_t& link = link_free[2 * rank + backward];
                    depart = std::max(end, link);
                    link = depart + duration;
                }
                (backward ? gradient_ready[at - 1] : input_ready[at + 1]) = depart + duration;
                wake((backward ? stage - 1 : stage + 1) % ranks);
            }
            ++position[rank];
            --left;
            run.makespan = std::max(run.makespan, end);
        }
    }
    run.stalled = left > 0;
    return run;
}

ListScheduler::ListScheduler(const PipelineShape& shape)
    : shape_(shape), stages_(shape.stages), starts_(shape.stages) {}

// Sets the stages up; false where a micro-batch does not fit, or fill, work and drain of a stage reach the bound.
bool ListScheduler::begin(const std::vector<const PassCosts*>& costs, int64_t bound) {
    int64_t fill = 0, drain = 0;
    for (int64_t s = 0; s < shape_.stages; ++s) {
        const int64_t room = shape_.memory_limit - shape_.model_state[s];
        int64_t work = 0, peak = 0, above = 0;
        for (const PassCosts* cost : costs) {
            work += cost->forward[s] + (shape_.forward_only ? 0 : cost->backward[s]);
            peak = std::max(peak, cost->peak[s]);
            if (shape_.peak_covers_backward) above = std::max(above, cost->peak[s] - cost->stored[s]);
        }
        if (peak > room || fill + work + drain >= bound) return false;
        stages_[s] = {0, shape_.model_state[s], work, above, drain, 0, 0, true};
        starts_[s] = kUnreachable;
        fill += costs.front()->forward[s] + costs.front()->forward_transfer[s];
        if (!shape_.forward_only && s + 1 < shape_.stages)
            drain += costs.back()->backward[s] + costs.back()->backward_transfer[s + 1];
    }
    return true;
}

int64_t ListScheduler::run(const std::vector<const PassCosts*>& costs, const Policy& policy, int64_t bound,
                           std::vector<uint8_t>* forwards) {
    const int64_t ranks = shape_.stages, count = costs.size();
    const int64_t kinds = shape_.forward_only ? 1 : 2;
    if (count == 0) return 0;
    if (!begin(costs, bound)) return kUnreachable;
    input_ready_.resize(ranks * count);
    gradient_ready_.resize(ranks * count);
    std::fill_n(input_ready_.begin(), count, 0);
    if (forwards) forwards->assign(ranks * count * kinds, 0);
    choose(0, costs, policy);
    int64_t makespan = 0;
    for (int64_t left = ranks * count * kinds; left > 0; --left) {
        int64_t s = 0, start = starts_[0];
        for (int64_t other = 1; other < ranks; ++other) {
            const bool earlier = starts_[other] < start;
            s = earlier ? other : s;
            start = earlier ? starts_[other] : start;
        }
        Stage& stage = stages_[s];
        if (start >= kUnreachable) return kUnreachable;  // strict, and short of memory upstream
        if (forwards) (*forwards)[s * count * kinds + stage.forwards + stage.backwards] = stage.next_is_forward;
        if (stage.next_is_forward) {
            const int64_t k = stage.forwards++;
            const PassCosts& cost = *costs[k];
            stage.free = start + cost.forward[s];
            stage.work_left -= cost.forward[s];
            if (!shape_.forward_only) stage.held += cost.stored[s];
            if (s + 1 < ranks) {
                input_ready_[(s + 1) * count + k] = stage.free + cost.forward_transfer[s];
                if (stages_[s + 1].forwards == k) choose(s + 1, costs, policy);  // else it waits for something else
            } else {
                gradient_ready_[s * count + k] = stage.free;
            }
        } else {
            const int64_t k = stage.backwards++;
            const PassCosts& cost = *costs[k];
            stage.free = start + cost.backward[s];
            stage.work_left -= cost.backward[s];
            stage.held -= cost.stored[s];
            if (s > 0) {
                gradient_ready_[(s - 1) * count + k] = stage.free + cost.backward_transfer[s];
                if (stages_[s - 1].backwards == k) choose(s - 1, costs, policy);
            }
        }
        if (stage.free + stage.work_left + stage.drain >= bound) return kUnreachable;
        makespan = std::max(makespan, stage.free);
        choose(s, costs, policy);
    }
    return makespan;
}

// The pass that stage s runs next, as far as it can know: of those that could start first, by the policy.
void ListScheduler::choose(int64_t s, const std::vector<const PassCosts*>& costs, const Policy& policy) {
    Stage& stage = stages_[s];
    const int64_t ranks = shape_.stages, count = costs.size();
    const int64_t k = stage.forwards;
    // Beside others in flight it must leave room for every backward.
    const auto needed = [&] {
        const int64_t peak = costs[k]->peak[s];
        return k == stage.backwards ? peak : std::max(peak, costs[k]->stored[s] + stage.above);
    };
    const bool admitted =
        k < count && (shape_.forward_only ||
                      (k - stage.backwards < policy.depth[s] && stage.held + needed() <= shape_.memory_limit));
    int64_t forward = kUnreachable, backward = kUnreachable;
    if (admitted && (s == 0 || k < stages_[s - 1].forwards))
        forward = std::max(stage.free, input_ready_[s * count + k]);
    if (!shape_.forward_only && !(admitted && policy.rule == Rule::kStrict) &&
        stage.backwards < (s + 1 < ranks ? stages_[s + 1].backwards : stage.forwards))
        backward = std::max(stage.free, gradient_ready_[s * count + stage.backwards]);
    stage.next_is_forward = forward < backward || (forward == backward && policy.rule == Rule::kForwardFirst);
    starts_[s] = std::min(forward, backward);
}

}  // namespace dynapipe
