// The steps of list scheduling, which a search runs by the million: what they read lies in one value that the compiler
// keeps in registers, and every kind of run has steps of its own.
#pragma once

#include <algorithm>

#include "schedule/list_schedule.h"

namespace dynapipe {

// With one chunk and whole samples, which a search runs most, a sequence is the micro-batches and needs no items.
template <bool kChunked, bool kDivided>
class ListScheduler::Loop {
public:
    Loop(ListScheduler& run, const Costs& costs, const Policy& policy)
        : run_(run),
          costs_(costs.data()),
          stages_(run.stages_.data()),
          starts_(run.starts_.data()),
          inputs_(run.inputs_.data()),
          gradients_(run.gradients_.data()),
          forward_(run.forward_.data()),
          backward_(run.backward_.data()),
          messages_(run.messages_.data()),
          above_(run.above_.data()),
          depth_(policy.depth.data()),
          rule_(policy.rule),
          least_gap_(policy.least_gap),
          items_(run.items_),
          last_(run.shape_.stages - 1),
          last_chunk_(run.shape_.chunks - 1),
          memory_limit_(run.shape_.memory_limit),
          ahead_(run.ahead_),
          deeper_(kChunked ? last_chunk_ * run.largest_group_ : 0),
          forward_only_(run.shape_.forward_only),
          turns_(!run.turned_.empty()),
          peak_covers_backward_(run.shape_.peak_covers_backward) {}

    // The stage whose next pass starts first; of even and odd ones apart, since every comparison waits for the last.
    int64_t earliest() const {
        int64_t even = 0, odd = 1;
        int64_t start = starts_[0], odd_start = last_ > 0 ? starts_[1] : kUnreachable;
        for (int64_t s = 2; s < last_; s += 2) {
            const bool earlier = starts_[s] < start, odd_earlier = starts_[s + 1] < odd_start;
            even = earlier ? s : even;
            start = earlier ? starts_[s] : start;
            odd = odd_earlier ? s + 1 : odd;
            odd_start = odd_earlier ? starts_[s + 1] : odd_start;
        }
        if (last_ % 2 == 0 && starts_[last_] < start) {
            even = last_;
            start = starts_[last_];
        }
        return odd_start < start || (odd_start == start && odd < even) ? odd : even;
    }

    // Runs the next pass of a stage; what it makes ready, on the stage itself where that is nothing, on none where it
    // does not fit the stage's memory.
    [[gnu::always_inline]] Fed step(int64_t s) {
        Stage& stage = stages_[s];
        if (kDivided && stage.next == kWeightPass) return step_weight(s, stage);
        const bool forward = stage.next == kForwardPass;
        const int64_t i = forward ? stage.forwards++ : stage.backwards++;
        const Item item = this->item(forward, i);
        const PassCosts cost = costs_[item.row];
        const int64_t v = virtual_stage(item, s);
        const Arrival& arrival = (forward ? inputs_ : gradients_)[s * items_ + i];
        if (kDivided && !forward && cost(kWeightNs, v) > 0) stage.next = kInputPass;
        if (forward) {
            if (v > 0) {
                stage.done[0] = arrival.answered;
                stage.input_pool = input_pool(s, ++stage.inputs);
                if (forward_only_)
                    ++stage.freed;
                else
                    stage.kept += input_message(cost, v);
            }
        } else {
            if (s < last_ || item.chunk < last_chunk_) {
                stage.done[1] = arrival.answered;
                ++stage.gradients;
            }
            stage.kept -= input_message(cost, v);
            if (stage.held + above_stored(cost, v) + message_bytes(s, stage.input_pool) > memory_limit_)
                return Fed(-1, 0, false);
            stage.freed += v > 0;
        }
        const int64_t time = cost.time(stage.next, v);
        stage.idle += starts_[s] - stage.free;
        stage.free = starts_[s] + time;
        if (forward && !forward_only_) stage.held += cost(kStoredBytes, v);
        if (stage.next == kBackwardPass) stage.held -= cost(kStoredBytes, v);
        if (!forward) release(s, stage);
        const Fed fed = run_.feeds(s, forward, i, item);
        if (fed.stage < 0) return Fed(s, 0, false);
        if (forward && !fed.forward) {
            gradients_[s * items_ + fed.place].ready = stage.free;
            return Fed(s, 0, false);
        }
        Arrival& at_other = (forward ? inputs_ : gradients_)[fed.stage * items_ + fed.place];
        at_other.ready = stage.free + cost(forward ? kForwardTransferNs : kBackwardTransferNs, v);
        at_other.answered = forward ? stage.gradients : stage.inputs;
        ++stage.sent[forward];
        stage.sent_pool = std::max(stage.sent_pool, stage.sent[0] + stage.sent[1] - stage.done[0] - stage.done[1]);
        return fed;
    }

    // Chooses for a stage that a pass was made ready for, unless it waits for something else.
    [[gnu::always_inline]] void choose_fed(const Fed& fed) {
        const Stage& stage = stages_[fed.stage];
        if (fed.place == (fed.forward ? stage.forwards : stage.backwards)) choose(fed.stage);
    }

    // The pass that stage s runs next, as far as it can know: of those that could start first, by the policy.
    [[gnu::always_inline]] void choose(int64_t s) {
        Stage& stage = stages_[s];
        const int64_t i = stage.forwards, j = stage.backwards;
        bool admitted = i < items_ && (forward_only_ || i - j < depth_[s] + deeper_ || is_awaited(i, j));
        bool urgent = false;  // a second half that makes room for the forward
        int64_t forward = kUnreachable, backward = kUnreachable;
        if (admitted) {
            const Arrival& input = inputs_[s * items_ + i];
            if (!forward_only_ && (input.ready < kUnreachable || rule_ == Rule::kStrict)) {
                admitted = has_room(s, stage, input);
                urgent = !admitted && input.ready <= stage.free;
            }
            if (admitted && input.ready < kUnreachable) forward = std::max(stage.free, input.ready);
        }
        if (!forward_only_ && j < items_ && !(admitted && rule_ == Rule::kStrict)) {
            const int64_t ready = gradients_[s * items_ + j].ready;
            if (ready < kUnreachable) backward = std::max(stage.free, ready);
        }
        const bool is_forward = forward < backward || (forward == backward && rule_ == Rule::kForwardFirst);
        stage.next = is_forward ? kForwardPass : kBackwardPass;
        const int64_t start = std::min(forward, backward);
        starts_[s] = start;
        if (!kDivided || stage.released == j || start < stage.free || (start == stage.free && !urgent)) return;
        const Item oldest = item(false, stage.released);
        const int64_t time = costs_[oldest.row](kWeightNs, virtual_stage(oldest, s));
        const int64_t gap = std::min(start - stage.free, time);
        if (urgent ? start == stage.free && rule_ == Rule::kBackwardFirst : 4 * gap < least_gap_ * time) return;
        stage.next = kWeightPass;
        starts_[s] = stage.free;
    }

private:
    Item item(bool forward, int64_t place) const {
        if constexpr (kChunked) return (forward ? forward_ : backward_)[place];
        return {place, 0, place, place};
    }
    int64_t virtual_stage(const Item& item, int64_t s) const { return kChunked ? item.chunk * (last_ + 1) + s : s; }
    // A chain's backward passes begin with its last forward, however deep that is.
    bool is_awaited(int64_t i, int64_t j) const {
        return kChunked && turns_ && j < items_ && item(false, j).forward >= i;
    }

    // Whether the next forward fits beside others in flight: it must leave room for every backward, and for what it
    // sends.
    [[gnu::always_inline]] bool has_room(int64_t s, const Stage& stage, const Arrival& input) const {
        const int64_t i = stage.forwards;
        const Item item = this->item(true, i);
        const PassCosts cost = costs_[item.row];
        const int64_t v = virtual_stage(item, s);
        const int64_t done = input.ready < kUnreachable && v > 0 ? input.answered : stage.done[0];
        const int64_t sent = stage.sent[0] + stage.sent[1] + 1 - done - stage.done[1];
        const int64_t after = cost(kStoredBytes, v) + above_[s] - input_message(cost, v) +
                              std::max<int64_t>(sent - stage.sent_pool, 0) * messages_[s].sent;
        const int64_t released = kDivided ? stage.released : stage.backwards;
        const int64_t needed = message_bytes(s, input_pool(s, stage.inputs + (v > 0))) +
                               (i == released ? cost(kPeakBytes, v) : std::max(cost(kPeakBytes, v), after));
        return stage.held + needed <= memory_limit_;
    }

    // Runs the oldest second half of a backward pass.
    Fed step_weight(int64_t s, Stage& stage) {
        const Item item = this->item(false, stage.released);
        const PassCosts cost = costs_[item.row];
        const int64_t v = virtual_stage(item, s), time = cost(kWeightNs, v);
        if (stage.held + above_stored(cost, v) + message_bytes(s, stage.input_pool) > memory_limit_)
            return Fed(-1, 0, false);
        ++stage.released;
        stage.free += time;
        stage.halves += time;
        stage.held -= cost(kStoredBytes, v);
        release(s, stage);
        return Fed(s, 0, false);
    }

    // Goes past backward passes that leave nothing for later.
    [[gnu::always_inline]] void release(int64_t s, Stage& stage) const {
        if constexpr (!kDivided) {
            stage.released = stage.backwards;
            return;
        }
        for (; stage.released < stage.backwards; ++stage.released) {
            const Item item = this->item(false, stage.released);
            if (costs_[item.row](kWeightNs, virtual_stage(item, s)) > 0) break;
        }
    }

    // What a backward pass, or either of its halves, holds above what its forward stored.
    int64_t above_stored(const PassCosts& cost, int64_t v) const {
        return peak_covers_backward_ ? cost(kPeakBytes, v) - cost(kStoredBytes, v) : 0;
    }
    // Bytes of messages that a stage holds beside what passes keep, with so many buffers for inputs.
    int64_t message_bytes(int64_t s, int64_t inputs) const {
        const Stage& stage = stages_[s];
        const Messages& messages = messages_[s];
        return inputs * messages.input + std::min(1 + ahead_, messages.gradients) * messages.gradient +
               stage.sent_pool * messages.sent - stage.kept;
    }
    // Buffers for inputs once so many were waited for.
    int64_t input_pool(int64_t s, int64_t inputs) const {
        return std::max<int64_t>(stages_[s].input_pool,
                                 std::min(inputs + ahead_, messages_[s].inputs) - stages_[s].freed);
    }

    const ListScheduler& run_;
    const PassCosts* const costs_;
    Stage* const stages_;
    int64_t* const starts_;
    Arrival *const inputs_, *const gradients_;
    const Item *const forward_, *const backward_;
    const Messages* const messages_;
    const int64_t *const above_, *const depth_;
    const Rule rule_;
    const int64_t least_gap_, items_, last_, last_chunk_, memory_limit_, ahead_, deeper_;
    const bool forward_only_, turns_, peak_covers_backward_;
};

}  // namespace dynapipe
