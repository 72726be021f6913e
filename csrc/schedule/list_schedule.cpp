#include "schedule/list_schedule.h"

#include <algorithm>

#include "checks.h"
#include "schedule/list_loop.h"

namespace dynapipe {
namespace {

constexpr int64_t kPoints = 64;  // of a trace, about

}  // namespace

// Even groups, as in core/orders.py.
void ListScheduler::number(int64_t count, bool full, const std::vector<int32_t>& turned) {
    if (numbered_ == count && full_ == full && turned_ == turned) return;
    numbered_ = count;
    full_ = full;
    turned_ = turned;
    const int64_t chunks = shape_.chunks, more = full ? 0 : shape_.stages - 1;
    const int64_t groups = std::max<int64_t>((count + more) / shape_.stages, 1);
    items_ = count * chunks;
    forward_.clear();
    backward_.clear();
    if (!has_items()) return;
    largest_group_ = count / groups + (count % groups > 0);
    std::vector<int64_t> forward_place(items_), backward_place(items_);
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t end = first + count / groups + (group < count % groups);
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            for (int64_t row = first; row < end; ++row) {
                forward_place[row * chunks + chunk] = forward_.size();
                forward_.push_back({row, chunk, -1, 0});
            }
        for (int64_t chunk = chunks - 1; chunk >= 0; --chunk)
            for (int64_t at = first; at < end; ++at) {
                const int64_t row = turned.empty() ? at : turned[at];
                backward_place[row * chunks + chunk] = backward_.size();
                backward_.push_back({row, chunk, -1, 0});
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
    const int64_t stages = shape_.stages, virtual_stages = shape_.virtual_stages();
    divided_ = divided;
    work_.assign(stages, 0);
    weights_.assign(stages, 0);
    for (const PassCosts& cost : costs) {
        const int64_t *forward = cost.of(kForwardNs), *backward = cost.of(kBackwardNs), *weight = cost.of(kWeightNs);
        for (int64_t first = 0; first < virtual_stages; first += stages)
            for (int64_t s = 0; s < stages; ++s) {
                work_[s] += forward[first + s] + (shape_.forward_only ? 0 : backward[first + s]);
                if (divided) weights_[s] += weight[first + s];
            }
    }
    int64_t warmup = 0, drain = 0;
    const PassCosts& last = turned_.empty() ? costs.back() : costs[turned_.back()];  // to run backward
    for (int64_t s = 0; s < stages; ++s) {
        if (warmup + work_[s] + std::max<int64_t>(drain - weights_[s], 0) >= bound) return false;
        most_idle_[s] = bound - work_[s];
        drain_[s] = drain - weights_[s];
        warmup += costs.front()(kForwardNs, s) + costs.front()(kForwardTransferNs, s);
        if (!shape_.forward_only && s + 1 < stages)
            drain += last(kBackwardNs, s) - (divided ? last(kWeightNs, s) : 0) + last(kBackwardTransferNs, s + 1);
    }
    return begin_memory(costs);
}

// What stages need room for; false where a micro-batch does not fit. Counts the passes.
bool ListScheduler::begin_memory(const Costs& costs) {
    const int64_t count = costs.size(), stages = shape_.stages, virtual_stages = shape_.virtual_stages();
    left_ = count * virtual_stages * (shape_.forward_only ? 1 : 2);
    largest_.assign(kCosts * virtual_stages, 0);
    largest_above_.assign(virtual_stages, 0);
    for (const PassCosts& cost : costs) {
        for (const Cost kind : {kPeakBytes, kForwardMessageBytes, kBackwardMessageBytes}) {
            const int64_t* const bytes = cost.of(kind);
            int64_t* const largest = largest_.data() + kind * virtual_stages;
            for (int64_t v = 0; v < virtual_stages; ++v) largest[v] = std::max(largest[v], bytes[v]);
        }
        if (shape_.peak_covers_backward)
            for (int64_t v = 0; v < virtual_stages; ++v)
                largest_above_[v] = std::max(largest_above_[v], cost(kPeakBytes, v) - cost(kStoredBytes, v));
        if (divided_)
            for (int64_t v = 0; v < virtual_stages; ++v) left_ += cost(kWeightNs, v) > 0;
    }
    const PassCosts largest(largest_.data(), virtual_stages);
    peaks_.assign(stages, 0);
    above_.assign(stages, 0);
    messages_.assign(stages, Messages());
    for (int64_t v = 0; v < virtual_stages; ++v) {
        const int64_t s = v % stages;
        peaks_[s] = std::max(peaks_[s], largest(kPeakBytes, v));
        above_[s] = std::max(above_[s], largest_above_[v]);
        Messages& messages = messages_[s];
        messages.input = std::max(messages.input, input_message(largest, v));
        messages.gradient = std::max(messages.gradient, gradient_message(shape_, largest, v));
        messages.sent = std::max(messages.sent, sent_message(shape_, largest, v));
    }
    for (int64_t s = 0; s < stages; ++s) {
        Messages& messages = messages_[s];
        messages.inputs = count * (shape_.chunks - (s == 0));
        messages.gradients = count * (shape_.chunks - (s + 1 == stages));
        int64_t peak = peaks_[s];
        if (shape_.forward_only)
            peak += std::min(1 + ahead_, messages.inputs) * messages.input + most_sent(s, count) * messages.sent;
        if (peak > shape_.memory_limit - shape_.model_state[s]) return false;
        stages_[s] = Stage();
        stages_[s].held = shape_.model_state[s];
        starts_[s] = kUnreachable;
    }
    return true;
}

// Places of the forward sequence that a run has in common with an earlier one. With several chunks the sequence goes
// group by group, chunk by chunk, and groups depend on how many micro-batches there are.
int64_t ListScheduler::shared_places(const Trace& before, const Costs& costs, const Policy& policy) const {
    const int64_t common = before.common(costs, policy, turned_), count = costs.size();
    if (shape_.chunks == 1) return common;
    if (static_cast<int64_t>(before.costs_.size()) != count) return 0;
    return std::find_if(forward_.begin(), forward_.end(), [&](const Item& item) { return item.row >= common; }) -
           forward_.begin();
}

// Goes to the last point of an earlier run at which only so many places mattered.
template <bool kChunked>
size_t ListScheduler::begin_from(const Trace& before, int64_t common) {
    if (before.above_ != above_ || before.messages_ != messages_) return 0;
    size_t at = before.used_;
    while (at > 0 && before.points_[at - 1].stages[0].forwards >= common) --at;
    if (at == 0) return 0;
    const Point& point = before.points_[at - 1];
    const int64_t width = before.costs_.size(), last = shape_.stages - 1;
    stages_ = point.stages;
    starts_ = point.starts;
    makespan_ = point.makespan;
    for (int64_t s = 0; s <= last; ++s) left_ -= stages_[s].passes;
    if (shape_.chunks > 1) {  // the same items: there are as many micro-batches
        for (int64_t s = 0; s <= last; ++s)
            for (const bool forward : {true, false})
                for (int64_t i = 0; i < (forward ? stages_[s].forwards : stages_[s].backwards); ++i) {
                    const Fed fed = feeds(s, forward, i, item<kChunked>(forward, i));
                    if (fed.stage < 0) continue;
                    const int64_t place = fed.stage * items_ + fed.place;
                    (fed.forward ? inputs_ : gradients_)[place] =
                        (fed.forward ? before.inputs_ : before.gradients_)[place];
                }
        return at;
    }
    for (int64_t s = 0; s <= last; ++s) {
        if (s > 0)
            std::copy_n(before.inputs_.begin() + s * width, stages_[s - 1].forwards, inputs_.begin() + s * items_);
        const auto gradients = before.gradients_.begin() + s * width;
        if (s < last) std::copy_n(gradients, stages_[s + 1].backwards, gradients_.begin() + s * items_);
    }
    for (int64_t i = 0; i < stages_[last].forwards; ++i) {
        const int64_t place = item<kChunked>(true, i).after;
        gradients_[last * items_ + place] = before.gradients_[last * width + place];
    }
    return at;
}

template <bool kChunked, bool kDivided>
int64_t ListScheduler::run_steps(const Costs& costs, const Policy& policy, std::vector<uint8_t>* kinds,
                                 const Trace* before, Trace* trace) {
    const int64_t stages = shape_.stages, passes = items_ * (shape_.forward_only ? 1 : kDivided ? 3 : 2);
    inputs_.assign(stages * items_, Arrival());
    gradients_.assign(stages * items_, Arrival());
    for (int64_t i = 0; i < items_; ++i)
        if (!kChunked || forward_[i].chunk == 0) inputs_[i].ready = 0;
    if (kinds) kinds->assign(stages * passes, kPassKinds);
    makespan_ = 0;
    const size_t shared = before ? begin_from<kChunked>(*before, shared_places(*before, costs, policy)) : 0;
    Loop<kChunked, kDivided> loop(*this, costs, policy);
    if (shared == 0) loop.choose(0);
    if (trace) trace->begin(shared);
    const int64_t apart = items_ / kPoints + 1;
    int64_t next_point = trace ? stages_[0].forwards + apart : kUnreachable;
    for (; left_ > 0; --left_) {
        const int64_t s = loop.earliest();
        Stage& stage = stages_[s];
        if (s == 0 && stage.forwards >= next_point && stage.next == kForwardPass) {
            mark(*trace);
            next_point += apart;
        }
        if (starts_[s] >= kUnreachable) return kUnreachable;  // the stages wait for one another, or for memory
        const int64_t at = s * passes + stage.passes++;
        const Fed fed = loop.step(s);
        if (fed.stage < 0) return kUnreachable;
        if (kinds) (*kinds)[at] = stage.next;
        const int64_t drain = stage.backwards < items_ ? std::max<int64_t>(drain_[s] + stage.halves, 0) : 0;
        if (stage.idle + drain >= most_idle_[s]) return kUnreachable;
        makespan_ = std::max(makespan_, stage.free);
        if (fed.stage != s) loop.choose_fed(fed);
        loop.choose(s);
    }
    if (trace) keep(*trace, costs, policy);
    return makespan_;
}

template <bool kChunked>
int64_t ListScheduler::run_chunked(const Costs& costs, const Policy& policy, int64_t bound, std::vector<uint8_t>* kinds,
                                   const Trace* before, Trace* trace) {
    if (costs.empty()) return 0;
    const bool divided = policy.least_gap != kUndivided && !shape_.forward_only;
    if (!begin(costs, bound, divided)) return kUnreachable;
    return divided ? run_steps<kChunked, true>(costs, policy, kinds, before, trace)
                   : run_steps<kChunked, false>(costs, policy, kinds, before, trace);
}

int64_t ListScheduler::run(const Costs& costs, const Policy& policy, int64_t bound, std::vector<uint8_t>* kinds,
                           const std::vector<int32_t>& turned, const Trace* before, Trace* trace) {
    number(costs.size(), policy.rule != Rule::kBackwardFirst, turned);
    if (trace) trace->begin(0);
    return has_items() ? run_chunked<true>(costs, policy, bound, kinds, before, trace)
                       : run_chunked<false>(costs, policy, bound, kinds, before, trace);
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
