// A pipeline and what one micro-batch costs on it; shared by simulation, list scheduling and search.
#pragma once

#include <cstdint>
#include <vector>

namespace dynapipe {

// Virtual stage v is chunk v / stages of pipeline stage v % stages.
struct PipelineShape {
    int64_t stages, chunks;
    bool forward_only;
    std::vector<int64_t> model_state;  // [stages] bytes
    int64_t memory_limit;
    bool peak_covers_backward;  // peaks count while either pass runs, not the forward alone

    int64_t virtual_stages() const { return stages * chunks; }
    void check() const;
};

// Costs of one micro-batch, each [virtual stages]; see ScheduleProblem in planning/problem.py.
struct PassCosts {
    const int64_t* forward;
    const int64_t* backward;
    const int64_t* stored;
    const int64_t* peak;
    const int64_t* forward_transfer;
    const int64_t* backward_transfer;
};

}  // namespace dynapipe
