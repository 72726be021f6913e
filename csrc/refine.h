// Bettering an order by moving samples between the micro-batches it is cut into (planning/refine.py, its twin).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "costs.h"
#include "cut.h"

namespace dynapipe {

// Places in the problem's order: the micro-batches of `cut` one after another, once the samples that stretch a
// micro-batch have been moved to others wherever that saves time under the option, no fill above the cut's.
std::vector<int64_t> refined_order(const CutProblem& problem, Costs& costs, size_t option, const Cut& cut);

}  // namespace dynapipe
