// Running micro-batches through a pipeline in a given order of passes (core/simulate.py states the rules).
#pragma once

#include <cstdint>
#include <vector>

#include "costs/pipeline.h"

namespace dynapipe {

struct Simulation {
    std::vector<int64_t> start, end;  // [stages][passes], as the order given; 0 where it holds none
    std::vector<int64_t> position;    // [stages] passes that have run
    int64_t makespan = 0;
    bool stalled = false;  // `position` says where
};

// `order` is [stages][passes]; micro-batches and chunks in it are trusted to exist. With `most_idle`, [stages], it
// stops, stalled, once a stage has waited for longer before its passes.
Simulation simulate(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order,
                    const std::vector<int64_t>* most_idle = nullptr);

}  // namespace dynapipe
