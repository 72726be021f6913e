#include "interleave.h"

#include <algorithm>

#include "checks.h"

namespace dynapipe {

// Groups as in planning/schedules/one_f_one_b.py: even ones, of at least as many micro-batches as there are ranks.
void InterleavedScheduler::number(int64_t count) {
    if (numbered_ == count) return;
    numbered_ = count;
    const int64_t chunks = shape_.chunks, groups = std::max<int64_t>(count / shape_.stages, 1);
    forward_.clear();
    backward_.clear();
    largest_group_ = count / groups + (count % groups > 0);
    std::vector<int64_t> forward_place(count * chunks), backward_place(count * chunks);
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t end = first + count / groups + (group < count % groups);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            for (int64_t row = first; row < end; ++row) {
                forward_place[row * chunks + chunk] = forward_.size();
                forward_.push_back({row, chunk, -1});
            }
        }
        for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
            for (int64_t row = first; row < end; ++row) {
                backward_place[row * chunks + chunk] = backward_.size();
                backward_.push_back({row, chunk, -1});
            }
        }
        first = end;
    }
    for (Item& item : forward_) {
        const int64_t at = item.row * chunks + item.chunk;
        item.after = item.chunk + 1 < chunks ? forward_place[at + 1] : backward_place[at];
    }
    for (Item& item : backward_)
        if (item.chunk > 0) item.after = backward_place[item.row * chunks + item.chunk - 1];
}

// Sets the ranks up; false where a micro-batch does not fit, or fill, work and drain of a rank reach the bound.
bool InterleavedScheduler::begin(const std::vector<const PassCosts*>& costs, int64_t bound) {
    int64_t fill = 0, drain = 0;
    for (int64_t rank = 0; rank < shape_.stages; ++rank) {
        const int64_t room = shape_.memory_limit - shape_.model_state[rank];
        int64_t work = 0, peak = 0, above = 0;
        for (const PassCosts* cost : costs) {
            for (int64_t v = rank; v < shape_.virtual_stages(); v += shape_.stages) {
                work += cost->forward[v] + (shape_.forward_only ? 0 : cost->backward[v]);
                peak = std::max(peak, cost->peak[v]);
                if (shape_.peak_covers_backward) above = std::max(above, cost->peak[v] - cost->stored[v]);
            }
        }
        if (peak > room || fill + work + drain >= bound) return false;
        ranks_[rank] = {0, shape_.model_state[rank], work, above, drain, 0, 0, kUnreachable, true};
        fill += costs.front()->forward[rank] + costs.front()->forward_transfer[rank];
        if (!shape_.forward_only && rank + 1 < shape_.stages)
            drain += costs.back()->backward[rank] + costs.back()->backward_transfer[rank + 1];
    }
    return true;
}

int64_t InterleavedScheduler::run(const std::vector<const PassCosts*>& costs, const Policy& policy, int64_t bound,
                                  std::vector<uint8_t>* forwards) {
    if (costs.empty()) return 0;
    if (!begin(costs, bound)) return kUnreachable;
    number(costs.size());
    const int64_t stages = shape_.stages, items = forward_.size();
    const int64_t passes = items * (shape_.forward_only ? 1 : 2);
    input_ready_.assign(stages * items, kUnreachable);
    gradient_ready_.assign(stages * items, kUnreachable);
    for (int64_t i = 0; i < items; ++i)
        if (forward_[i].chunk == 0) input_ready_[i] = 0;
    if (forwards) forwards->assign(stages * passes, 0);
    choose(0, costs, policy);
    int64_t makespan = 0;
    for (int64_t left = stages * passes; left > 0; --left) {
        int64_t s = 0;
        for (int64_t other = 1; other < stages; ++other)
            if (ranks_[other].start < ranks_[s].start) s = other;
        Rank& rank = ranks_[s];
        if (rank.start >= kUnreachable) return kUnreachable;  // the ranks wait for one another, or for memory
        if (forwards) (*forwards)[s * passes + rank.forwards + rank.backwards] = rank.next_is_forward;
        const int64_t fed = step(s, costs);
        if (rank.free + rank.work_left + rank.drain >= bound) return kUnreachable;
        makespan = std::max(makespan, rank.free);
        if (fed != s) choose(fed, costs, policy);
        choose(s, costs, policy);
    }
    return makespan;
}

// Runs a rank's next pass; the rank that it feeds, or itself.
int64_t InterleavedScheduler::step(int64_t s, const std::vector<const PassCosts*>& costs) {
    Rank& rank = ranks_[s];
    const int64_t stages = shape_.stages, items = forward_.size(), last = stages - 1;
    const bool forward = rank.next_is_forward;
    const int64_t i = forward ? rank.forwards++ : rank.backwards++;
    const Item& item = (forward ? forward_ : backward_)[i];
    const PassCosts& cost = *costs[item.row];
    const int64_t v = item.chunk * stages + s;
    const int64_t time = (forward ? cost.forward : cost.backward)[v];
    rank.free = rank.start + time;
    rank.work_left -= time;
    if (!shape_.forward_only) rank.held += forward ? cost.stored[v] : -cost.stored[v];
    const int64_t arrives = rank.free + (forward ? cost.forward_transfer : cost.backward_transfer)[v];
    if (forward && s == last && item.chunk + 1 == shape_.chunks) {
        if (!shape_.forward_only) gradient_ready_[s * items + item.after] = rank.free;
        return s;
    }
    if (!forward && v == 0) return s;
    const int64_t fed = forward ? (s + 1) % stages : (s + last) % stages;
    const bool wraps = s == (forward ? last : 0);
    (forward ? input_ready_ : gradient_ready_)[fed * items + (wraps ? item.after : i)] = arrives;
    return fed;
}

// The pass that a rank runs next, as far as it can know: of those that could start first, by the policy.
void InterleavedScheduler::choose(int64_t s, const std::vector<const PassCosts*>& costs, const Policy& policy) {
    Rank& rank = ranks_[s];
    const int64_t items = forward_.size(), i = rank.forwards, j = rank.backwards;
    bool admitted = i < items;
    if (admitted && !shape_.forward_only) {
        const PassCosts& cost = *costs[forward_[i].row];
        const int64_t v = forward_[i].chunk * shape_.stages + s;
        // Beside others in flight it must leave room for every backward.
        const int64_t needed = i == j ? cost.peak[v] : std::max(cost.peak[v], cost.stored[v] + rank.above);
        admitted = i - j < policy.depth[s] + (shape_.chunks - 1) * largest_group_ &&
                   rank.held + needed <= shape_.memory_limit;
    }
    int64_t forward = kUnreachable, backward = kUnreachable;
    if (admitted && input_ready_[s * items + i] < kUnreachable)
        forward = std::max(rank.free, input_ready_[s * items + i]);
    if (!shape_.forward_only && j < items && !(admitted && policy.rule == Rule::kStrict) &&
        gradient_ready_[s * items + j] < kUnreachable)
        backward = std::max(rank.free, gradient_ready_[s * items + j]);
    rank.next_is_forward = forward < backward || (forward == backward && policy.rule == Rule::kForwardFirst);
    rank.start = std::min(forward, backward);
}

}  // namespace dynapipe
