// Joining the halves of divided backward passes that gain nothing.
#pragma once

#include <vector>

#include "batches.h"
#include "pipeline.h"

namespace dynapipe {

// Joins every divided backward pass of an order [stages][passes] whose halves, run together, make the iteration no
// longer. Each one takes a simulation: with more than 350 rows on eight stages only the first ones of a stage are tried.
void join_halves(const PipelineShape& shape, const MicroBatches& batches, std::vector<Pass>& order);

}  // namespace dynapipe
