#include "list_schedule.h"

#include <algorithm>

#include "checks.h"

namespace dynapipe {

// Groups as in planning/schedules/one_f_one_b.py: even ones, of at least as many micro-batches as there are stages.
void ListScheduler::number(int64_t count, const std::vector<int32_t>& turned) {
    if (numbered_ == count && turned_ == turned) return;
    numbered_ = count;
    turned_ = turned;
    const int64_t chunks = shape_.chunks, groups = std::max<int64_t>(count / shape_.stages, 1);
    items_ = count * chunks;
    forward_.clear();
    backward_.clear();
    if (!has_items()) return;
    largest_group_ = count / groups + (count % groups > 0);
    std::vector<int64_t> forward_place(items_), backward_place(items_);
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t end = first + count / groups + (group < count % groups);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            for (int64_t row = first; row < end; ++row) {
                forward_place[row * chunks + chunk] = forward_.size();
                forward_.push_back({row, chunk, -1, 0});
            }
        }
        for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
            for (int64_t at = first; at < end; ++at) {
                const int64_t row = turned.empty() ? at : turned[at];
                backward_place[row * chunks + chunk] = backward_.size();
                backward_.push_back({row, chunk, -1, 0});
            }
        }
        first = end;
    }
    for (Item& item : forward_) {
        const int64_t at = item.row * chunks + item.chunk;
        item.after = item.chunk + 1 < chunks ? forward_place[at + 1] : backward_place[at];
    }
    for (Item& item : backward_) {
        if (item.chunk > 0) item.after = backward_place[item.row * chunks + item.chunk - 1];
        item.forward = forward_place[item.row * chunks + item.chunk];
    }
}

// Sets the stages up; false where a micro-batch does not fit, or warm-up, work and drain of a stage reach the bound.
bool ListScheduler::begin(const Costs& costs, int64_t bound, bool divided) {
    int64_t warmup = 0, drain = 0;
    left_ = 0;
    divided_ = divided;
    const PassCosts* const last = turned_.empty() ? costs.back() : costs[turned_.back()];  // to run backward
    for (int64_t s = 0; s < shape_.stages; ++s) {
        const int64_t room = shape_.memory_limit - shape_.model_state[s];
        int64_t work = 0, weights = 0, peak = 0, above = 0;
        for (const PassCosts* cost : costs) {
            for (int64_t v = s; v < shape_.virtual_stages(); v += shape_.stages) {
                work += cost->forward[v] + (shape_.forward_only ? 0 : cost->backward[v]);
                left_ += shape_.forward_only ? 1 : 2;
                if (divided && cost->weight[v] > 0) {
                    weights += cost->weight[v];
                    ++left_;
                }
                peak = std::max(peak, cost->peak[v]);
                if (shape_.peak_covers_backward) above = std::max(above, cost->peak[v] - cost->stored[v]);
            }
        }
        if (peak > room || warmup + work + std::max<int64_t>(drain - weights, 0) >= bound) return false;
        stages_[s] = {0, shape_.model_state[s], work, above, drain, weights, 0, 0, 0, 0, kForwardPass};
        starts_[s] = kUnreachable;
        warmup += costs.front()->forward[s] + costs.front()->forward_transfer[s];
        if (!shape_.forward_only && s + 1 < shape_.stages)
            drain += last->backward[s] - (divided ? last->weight[s] : 0) + last->backward_transfer[s + 1];
    }
    return true;
}

// The stage whose next pass starts first.
int64_t ListScheduler::earliest() const {
    int64_t s = 0, start = starts_[0];
    for (int64_t other = 1; other < shape_.stages; ++other) {
        const bool earlier = starts_[other] < start;
        s = earlier ? other : s;
        start = earlier ? starts_[other] : start;
    }
    return s;
}

template <bool kChunked>
int64_t ListScheduler::run_chunked(const Costs& costs, const Policy& policy, int64_t bound,
                                   std::vector<uint8_t>* kinds) {
    if (costs.empty()) return 0;
    const bool divided = policy.least_gap != kUndivided && !shape_.forward_only;
    if (!begin(costs, bound, divided)) return kUnreachable;
    const int64_t stages = shape_.stages, passes = items_ * (shape_.forward_only ? 1 : divided ? 3 : 2);
    input_ready_.assign(stages * items_, kUnreachable);
    gradient_ready_.assign(stages * items_, kUnreachable);
    for (int64_t i = 0; i < items_; ++i)
        if (item<kChunked>(true, i).chunk == 0) input_ready_[i] = 0;
    if (kinds) kinds->assign(stages * passes, kPassKinds);
    choose<kChunked>(0, costs, policy);
    int64_t makespan = 0;
    for (; left_ > 0; --left_) {
        const int64_t s = earliest();
        Stage& stage = stages_[s];
        if (starts_[s] >= kUnreachable) return kUnreachable;  // the stages wait for one another, or for memory
        const int64_t at = s * passes + stage.passes++;
        Fed fed{s, 0, false};
        if (stage.next == kWeightPass) step_weight<kChunked>(s, costs);
        else fed = step<kChunked>(s, costs);
        if (kinds) (*kinds)[at] = stage.next;
        if (stage.free + stage.work_left + std::max<int64_t>(stage.drain - stage.weight_left, 0) >= bound)
            return kUnreachable;
        makespan = std::max(makespan, stage.free);
        if (fed.stage != s) {
            const Stage& other = stages_[fed.stage];  // unless it waits for something else
            if (fed.place == (fed.forward ? other.forwards : other.backwards))
                choose<kChunked>(fed.stage, costs, policy);
        }
        choose<kChunked>(s, costs, policy);
    }
    return makespan;
}

// Runs the oldest second half of a backward pass.
template <bool kChunked>
void ListScheduler::step_weight(int64_t s, const Costs& costs) {
    Stage& stage = stages_[s];
    const Item item = this->item<kChunked>(false, stage.released++);
    const int64_t v = item.chunk * shape_.stages + s, time = costs[item.row]->weight[v];
    stage.free += time;
    stage.work_left -= time;
    stage.weight_left -= time;
    stage.held -= costs[item.row]->stored[v];
    release<kChunked>(s, costs);
}

// Goes past backward passes that leave nothing for later.
template <bool kChunked>
void ListScheduler::release(int64_t s, const Costs& costs) {
    Stage& stage = stages_[s];
    for (; stage.released < stage.backwards; ++stage.released) {
        const Item item = this->item<kChunked>(false, stage.released);
        if (divided_ && costs[item.row]->weight[item.chunk * shape_.stages + s] > 0) break;
    }
}

// Runs a stage's next pass; what it makes ready, on the stage itself where that is nothing.
template <bool kChunked>
ListScheduler::Fed ListScheduler::step(int64_t s, const Costs& costs) {
    Stage& stage = stages_[s];
    const int64_t stages = shape_.stages, last = stages - 1;
    const bool forward = stage.next == kForwardPass;
    const int64_t i = forward ? stage.forwards++ : stage.backwards++;
    const Item item = this->item<kChunked>(forward, i);
    const PassCosts& cost = *costs[item.row];
    const int64_t v = item.chunk * stages + s;
    if (!forward && divided_ && cost.weight[v] > 0) stage.next = kInputPass;
    const int64_t time = cost.time(stage.next, v);
    stage.free = starts_[s] + time;
    stage.work_left -= time;
    if (forward && !shape_.forward_only) stage.held += cost.stored[v];
    if (stage.next == kBackwardPass) stage.held -= cost.stored[v];
    if (!forward) release<kChunked>(s, costs);
    if (forward && v == shape_.virtual_stages() - 1) {
        gradient_ready_[s * items_ + item.after] = stage.free;
        return {s, 0, false};
    }
    if (!forward && v == 0) return {s, 0, false};
    const int64_t arrives = stage.free + (forward ? cost.forward_transfer : cost.backward_transfer)[v];
    const bool wraps = s == (forward ? last : 0);
    const int64_t fed = forward ? (wraps ? 0 : s + 1) : (wraps ? last : s - 1);
    const int64_t place = wraps ? item.after : i;
    (forward ? input_ready_ : gradient_ready_)[fed * items_ + place] = arrives;
    return {fed, place, forward};
}

// The pass that stage s runs next, as far as it can know: of those that could start first, by the policy.
template <bool kChunked>
void ListScheduler::choose(int64_t s, const Costs& costs, const Policy& policy) {
    Stage& stage = stages_[s];
    const int64_t i = stage.forwards, j = stage.backwards;
    const int64_t depth = policy.depth[s] + (kChunked ? (shape_.chunks - 1) * largest_group_ : 0);
    bool admitted = i < items_, urgent = false;  // a second half that makes room for the forward
    if (admitted && !shape_.forward_only) {
        const Item item = this->item<kChunked>(true, i);
        const PassCosts& cost = *costs[item.row];
        const int64_t v = item.chunk * shape_.stages + s;
        // Beside others in flight it must leave room for every backward.
        const int64_t needed = i == stage.released ? cost.peak[v] : std::max(cost.peak[v], cost.stored[v] + stage.above);
        // A chain's backward passes begin with its last forward, however deep that is.
        const bool awaited = kChunked && !turned_.empty() && j < items_ && this->item<kChunked>(false, j).forward >= i;
        const bool wanted = i - j < depth || awaited;
        admitted = wanted && stage.held + needed <= shape_.memory_limit;
        urgent = wanted && !admitted && input_ready_[s * items_ + i] <= stage.free;
    }
    int64_t forward = kUnreachable, backward = kUnreachable;
    if (admitted && input_ready_[s * items_ + i] < kUnreachable)
        forward = std::max(stage.free, input_ready_[s * items_ + i]);
    if (!shape_.forward_only && j < items_ && !(admitted && policy.rule == Rule::kStrict) &&
        gradient_ready_[s * items_ + j] < kUnreachable)
        backward = std::max(stage.free, gradient_ready_[s * items_ + j]);
    const bool is_forward = forward < backward || (forward == backward && policy.rule == Rule::kForwardFirst);
    stage.next = is_forward ? kForwardPass : kBackwardPass;
    starts_[s] = std::min(forward, backward);
    if (stage.released == j || starts_[s] < stage.free || (starts_[s] == stage.free && !urgent)) return;
    const Item oldest = this->item<kChunked>(false, stage.released);
    const int64_t time = costs[oldest.row]->weight[oldest.chunk * shape_.stages + s];
    const int64_t gap = std::min(starts_[s] - stage.free, time);
    if (urgent ? starts_[s] == stage.free && policy.rule == Rule::kBackwardFirst : 4 * gap < policy.least_gap * time)
        return;
    stage.next = kWeightPass;
    starts_[s] = stage.free;
}

int64_t ListScheduler::run(const Costs& costs, const Policy& policy, int64_t bound, std::vector<uint8_t>* kinds,
                           const std::vector<int32_t>& turned) {
    number(costs.size(), turned);
    return has_items() ? run_chunked<true>(costs, policy, bound, kinds)
                       : run_chunked<false>(costs, policy, bound, kinds);
}

std::vector<Pass> ListScheduler::order(const std::vector<uint8_t>& kinds) const {
    const int64_t passes = kinds.size() / shape_.stages;
    std::vector<Pass> order(kinds.size(), kNoPass);
    for (int64_t s = 0; s < shape_.stages; ++s) {
        int64_t places[2] = {0, 0};  // in the sequences of backward and forward passes
        std::vector<Pass> halves;    // first ones
        size_t second = 0;
        for (int64_t i = s * passes; i < (s + 1) * passes && kinds[i] < kPassKinds; ++i) {
            if (kinds[i] == kWeightPass) {
                order[i] = halves[second++] + kWeightPass - kInputPass;
                continue;
            }
            const bool forward = kinds[i] == kForwardPass;
            const int64_t place = places[forward]++;
            const Item at = has_items() ? item<true>(forward, place) : item<false>(forward, place);
            order[i] = (at.row * shape_.chunks + at.chunk) * kPassKinds + kinds[i];
            if (kinds[i] == kInputPass) halves.push_back(order[i]);
        }
    }
    return order;
}

}  // namespace dynapipe
