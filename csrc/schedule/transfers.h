// Running micro-batches through a pipeline in a given order of passes, with the starts of transfers as instructions
// that wait (core/simulate.py states the rules).
#pragma once

#include <cstdint>
#include <vector>

#include "costs/pipeline.h"
#include "schedule/simulate.h"

namespace dynapipe {

// As `simulate`, under the rules of `shape.transfers`. It stalls where stages would wait for one another.
Simulation simulate_transfers(const PipelineShape& shape, const std::vector<PassCosts>& costs,
                              const std::vector<Pass>& order);

}  // namespace dynapipe
