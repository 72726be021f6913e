// Local search that moves samples between the micro-batches of a partition.
//
// A partition of a sorted order leaves micro-batches that one or two long inputs or targets stretch. Those samples move
// to wherever they cost least, while that saves time; the micro-batches one after another are the new order, whose best
// partition costs no more than before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "costs/costs.h"
#include "search/partition.h"

namespace dynapipe {

// Places in the order that was partitioned. Micro-batches fit under the option, and none warms up for longer than the
// partition's longest.
std::vector<int64_t> improved_order(const Problem& problem, CostCache& costs, const Lengths& lengths, size_t option,
                                    const Partition& partition);

}  // namespace dynapipe
