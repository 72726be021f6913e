// List scheduling: the order in which stages take passes as they become ready. The rules are told in
// core/orders.py.
#pragma once

#include <cstdint>
#include <vector>

#include "checks.h"
#include "costs/memory.h"
#include "costs/pipeline.h"
#include "schedule/simulate.h"

namespace dynapipe {

// Which pass a stage takes where a forward and a backward pass could both start; `kStrict` is 1F1B, which waits for a
// forward pass until `depth` are in flight and for a backward pass then.
enum class Rule { kBackwardFirst, kForwardFirst, kStrict, kRules };

constexpr int64_t kUndivided = -1;

struct Policy {
    // [stages] most forwards of a stage ahead of its backwards; with several chunks, beyond the passes that the largest
    // group of micro-batches makes on all chunks but the last.
    std::vector<int64_t> depth;
    Rule rule;
    // Where backward passes are divided, a stage runs its oldest second half instead of waiting for its next pass for
    // at least this many quarters of the half's time.
    int64_t least_gap = kUndivided;

    bool operator==(const Policy& other) const = default;
};

// Micro-batches come in the order given. Buffers are kept between calls, since a search makes thousands.
class ListScheduler {
    struct Stage {
        int64_t free = 0;       // ns from which on the stage can run its next pass
        int64_t held = 0;       // bytes, model state included
        int64_t idle = 0;       // ns of `free` in which it waited
        int64_t halves = 0;     // ns of `free` in second halves
        int64_t forwards = 0;   // passes that have run
        int64_t backwards = 0;  // passes that have run
        int64_t released = 0;   // backwards up to the first that waits for its second half
        int64_t passes = 0;     // passes that have run
        PassKind next = kForwardPass;
        // Messages: received inputs and gradients that were waited for, inputs that are no longer needed, bytes of
        // those that forwards keep; what was sent, and is known to be received, gradients and activations; the pools'
        // buffers.
        int32_t inputs = 0, gradients = 0, freed = 0;
        int32_t sent[2] = {0, 0}, done[2] = {0, 0};
        int32_t input_pool = 0, sent_pool = 0;
        int64_t kept = 0;
    };
    // What a pass waits for: when it is there, and how many of the stage's messages its sender had received by then.
    struct Arrival {
        int64_t ready = kUnreachable, answered = 0;
    };
    // A stage's messages: the largest of each pool, how many it receives.
    struct Messages {
        int64_t input = 0, gradient = 0, sent = 0, inputs = 0, gradients = 0;

        bool operator==(const Messages& other) const {  // of as large buffers
            return input == other.input && gradient == other.gradient && sent == other.sent;
        }
    };
    // A state right before the first stage's next pass, a forward.
    struct Point {
        std::vector<Stage> stages;
        std::vector<int64_t> starts;
        int64_t makespan = 0;
    };

public:
    using Costs = std::vector<PassCosts>;

    // A run, for others that begin as it does: until the first stage comes to a micro-batch that differs, all stages
    // take the same passes.
    //
    //     micro-batches   a b c d e f        points  a · c · e ·
    //     the next run    a b c e d f                a · c ──► from here on
    class Trace {
    public:
        // Begins anew, but for points that the earlier run's trace has.
        void begin(size_t shared);
        // Takes the place of the trace that its run began from.
        void replace(Trace& before);

    private:
        friend class ListScheduler;
        // Micro-batches at the beginning that a run has in common with this one.
        int64_t common(const Costs& costs, const Policy& policy, const std::vector<int32_t>& turned) const;

        Costs costs_;  // empty where no run is kept
        Policy policy_;
        std::vector<int32_t> turned_;
        std::vector<int64_t> above_;
        std::vector<Messages> messages_;
        std::vector<Arrival> inputs_, gradients_;
        std::vector<Point> points_;
        size_t used_ = 0, shared_ = 0;  // points; those of them that stay in the trace that the run began from
    };

    explicit ListScheduler(const PipelineShape& shape)
        : shape_(shape),
          stages_(shape.stages),
          above_(shape.stages),
          messages_(shape.stages),
          most_idle_(shape.stages),
          drain_(shape.stages),
          starts_(shape.stages) {}

    // The makespan, or kUnreachable once it is known to reach `bound`, where a micro-batch does not fit a stage's
    // memory, and where stages wait for one another.
    // Fills `kinds`, if given, with [stages][passes], kPassKinds where a stage has fewer. Forward passes keep one
    // sequence on all stages, and so do backward passes and their second halves: group by group, and in a group chunk
    // by chunk. `turned`, where it is not empty, says which micro-batch each place of the backward sequence runs
    // (Chains). Begins from the trace `before`, where it can, and fills `trace`; costs are the same where their
    // addresses are.
    int64_t run(const Costs& costs, const Policy& policy, int64_t bound, std::vector<uint8_t>* kinds,
                const std::vector<int32_t>& turned = {}, const Trace* before = nullptr, Trace* trace = nullptr);

    // The order of passes, [stages][passes], that the `kinds` of the last run say.
    std::vector<Pass> order(const std::vector<uint8_t>& kinds) const;

private:
    // A place of a sequence: a micro-batch on a chunk. `after` is the place, in the sequence of what runs next, of the
    // pass that the ring's end feeds: the next chunk's; after the last forward, its backward; -1 after the last.
    // `forward` is the place of a backward's forward.
    struct Item {
        int64_t row, chunk, after, forward;
    };
    // What a pass makes ready: a forward's input, or a backward's gradient, at a place of a stage's sequence.
    struct Fed {
        int32_t stage, place;  // 12 bytes in all, which are returned in registers
        bool forward;

        Fed(int64_t stage, int64_t place, bool forward)
            : stage(static_cast<int32_t>(stage)), place(static_cast<int32_t>(place)), forward(forward) {}
    };

    template <bool kChunked, bool kDivided>
    class Loop;
    template <bool kChunked>
    int64_t run_chunked(const Costs& costs, const Policy& policy, int64_t bound, std::vector<uint8_t>* kinds,
                        const Trace* before, Trace* trace);
    template <bool kChunked, bool kDivided>
    int64_t run_steps(const Costs& costs, const Policy& policy, std::vector<uint8_t>* kinds, const Trace* before,
                      Trace* trace);
    int64_t shared_places(const Trace& before, const Costs& costs, const Policy& policy) const;
    template <bool kChunked>
    size_t begin_from(const Trace& before, int64_t common);
    // After the last forward its own backward; nothing, on stage -1, after the last backward.
    Fed feeds(int64_t s, bool forward, int64_t i, const Item& item) const {
        const int64_t last = shape_.stages - 1;
        if (s == (forward ? last : 0)) {
            if (item.chunk == (forward ? shape_.chunks - 1 : 0)) return Fed(forward ? s : -1, item.after, false);
            return Fed(last - s, item.after, forward);
        }
        return Fed(forward ? s + 1 : s - 1, i, forward);
    }
    template <bool kChunked>
    Item item(bool forward, int64_t place) const {
        if constexpr (kChunked) return (forward ? forward_ : backward_)[place];
        return {place, 0, place, place};
    }

    // Messages that a stage of a forward-only plan holds at most of what it sends.
    int64_t most_sent(int64_t s, int64_t count) const {
        return s + 1 < shape_.stages ? std::min(kSentAhead, count * shape_.chunks) : count * (shape_.chunks - 1);
    }
    void number(int64_t count, bool full, const std::vector<int32_t>& turned);
    bool begin(const Costs& costs, int64_t bound, bool divided);
    bool begin_memory(const Costs& costs);
    void mark(Trace& trace) const;
    void keep(Trace& trace, const Costs& costs, const Policy& policy);
    bool has_items() const { return shape_.chunks > 1 || !turned_.empty(); }

    const PipelineShape& shape_;
    int64_t numbered_ = -1, items_ = 0, largest_group_ = 0, left_ = 0;
    bool divided_ = false, full_ = false;
    std::vector<int32_t> turned_;
    std::vector<Item> forward_, backward_;
    std::vector<Stage> stages_;
    const int64_t ahead_ = shape_.transfers.receive_ahead != 0;  // receives that are posted before they are waited for
    std::vector<int64_t> largest_, largest_above_;               // [kCosts][virtual stages], [virtual stages]
    std::vector<int64_t> above_;                                 // [stages] room that every backward finds
    std::vector<int64_t> work_, weights_, peaks_;                // [stages] of all micro-batches
    std::vector<Messages> messages_;                             // [stages]
    std::vector<int64_t> most_idle_;  // [stages] which the iteration's time reaches the bound with
    std::vector<int64_t>
        drain_;  // [stages] least time from the last pass to the iteration's end, less the second halves
    int64_t makespan_ = 0;
    std::vector<int64_t> starts_;  // [stages] of the pass to run next; apart, since every step looks through them
    std::vector<Arrival> inputs_, gradients_;  // [stages][items]
};

}  // namespace dynapipe
