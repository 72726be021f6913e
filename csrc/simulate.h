// Running micro-batches through a pipeline: a given order of passes, or the order that list scheduling chooses.
// The Python twins are planning/simulate.py and planning/schedules/list_scheduling.py.
#pragma once

#include <cstdint>
#include <vector>

namespace dynapipe {

// Costs of one micro-batch, each [virtual stages]; see planning/problem.py.
struct PassCosts {
    const int64_t* forward;
    const int64_t* backward;
    const int64_t* stored;
    const int64_t* peak;
    const int64_t* forward_transfer;
    const int64_t* backward_transfer;
};

struct PipelineShape {
    int64_t stages, chunks;
    bool forward_only;
    std::vector<int64_t> model_state;  // [stages] bytes
    int64_t memory_limit;
    bool peak_covers_backward;  // peaks count while either pass runs, not the forward alone

    int64_t virtual_stages() const { return stages * chunks; }
};

// A pass: micro-batch * 2 * chunks + chunk * 2 + (1 if backward).
using Pass = int64_t;

struct Simulation {
    std::vector<int64_t> start, end;  // [stages][passes], as the order given
    std::vector<int64_t> peak;        // [stages]
    int64_t makespan = 0;
    bool stalled = false;
};

// `order` is [stages][passes]; micro-batches and chunks in it are trusted to exist.
Simulation simulate(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order,
                    bool queue_links);

// Which pass list scheduling takes where a forward and a backward pass could both start; `kStrict` is 1F1B, which
// waits for a forward pass until `depth` are in flight and for a backward pass then.
enum class Rule { kBackwardFirst, kForwardFirst, kStrict, kRules };

struct Policy {
    // [stages] most forwards of a rank ahead of its backwards; with several chunks, beyond the passes that the largest
    // group of micro-batches makes on all chunks but the last.
    std::vector<int64_t> depth;
    Rule rule;
};

// Takes passes as they become ready, one chunk per rank, micro-batches in the order given. Buffers are kept between
// calls, since a search makes thousands.
class ListScheduler {
public:
    explicit ListScheduler(const PipelineShape& shape);

    // The makespan, or kUnreachable once it is known to reach `bound`, where a micro-batch does not fit a stage's
    // memory, and where a strict policy stalls.
    // Fills `forwards`, if given, with [stages][2 * count]: 1 for a forward pass, 0 for a backward pass.
    int64_t run(const std::vector<const PassCosts*>& costs, const Policy& policy, int64_t bound,
                std::vector<uint8_t>* forwards);

private:
    struct Stage {
        int64_t free, held, work_left;
        int64_t above;                // room that every backward finds
        int64_t drain;                // the least time from the stage's last pass to the iteration's end
        int64_t forwards, backwards;  // that have run
        bool next_is_forward;
    };

    bool begin(const std::vector<const PassCosts*>& costs, int64_t bound);
    void choose(int64_t s, const std::vector<const PassCosts*>& costs, const Policy& policy);

    const PipelineShape& shape_;
    std::vector<Stage> stages_;
    std::vector<int64_t> starts_;  // [stages] of the pass to run next; apart, since every step looks through them
    std::vector<int64_t> input_ready_, gradient_ready_;  // [stages][micro-batches]
};

}  // namespace dynapipe
