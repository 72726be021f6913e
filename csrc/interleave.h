// List scheduling where every rank holds several chunks of the model. The Python twin,
// planning/schedules/list_scheduling.py, treats one chunk alike; here that case has code of its own (ListScheduler),
// since a search runs it most.
#pragma once

#include <cstdint>
#include <vector>

#include "simulate.h"

namespace dynapipe {

class InterleavedScheduler {
public:
    explicit InterleavedScheduler(const PipelineShape& shape) : shape_(shape), ranks_(shape.stages) {}

    // As ListScheduler::run, `forwards` being [stages][2 * count * chunks]. Passes keep one sequence on all ranks,
    // forward and backward: group by group, and in a group chunk by chunk.
    int64_t run(const std::vector<const PassCosts*>& costs, const Policy& policy, int64_t bound,
                std::vector<uint8_t>* forwards);

private:
    // A place of a sequence: a micro-batch on a chunk. `after` is the place, in the sequence of what runs next, of the
    // pass that the ring's end feeds: the next chunk's; after the last forward, its backward; -1 after the last.
    struct Item {
        int64_t row, chunk, after;
    };
    struct Rank {
        int64_t free, held, work_left;
        int64_t above;  // room that every backward finds
        int64_t drain;  // the least time from the rank's last pass to the iteration's end
        int64_t forwards, backwards;
        int64_t start;  // of the pass to run next
        bool next_is_forward;
    };

    void number(int64_t count);
    bool begin(const std::vector<const PassCosts*>& costs, int64_t bound);
    void choose(int64_t rank, const std::vector<const PassCosts*>& costs, const Policy& policy);
    int64_t step(int64_t rank, const std::vector<const PassCosts*>& costs);

    const PipelineShape& shape_;
    int64_t numbered_ = -1, largest_group_ = 0;
    std::vector<Item> forward_, backward_;
    std::vector<Rank> ranks_;
    std::vector<int64_t> input_ready_, gradient_ready_;  // [stages][items]; kUnreachable until known
};

}  // namespace dynapipe
