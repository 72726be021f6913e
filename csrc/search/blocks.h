// Orders of blocks of micro-batches that a search begins with.
#pragma once

#include <cstdint>
#include <vector>

#include "search/batches.h"

namespace dynapipe {

// Micro-batches that follow one another: one, or those of a bundle (Chains).
using Blocks = std::vector<MicroBatches>;

int64_t work_of(const MicroBatches& block);
MicroBatches joined(const Blocks& blocks);

// Blocks assigned to replicas, the longest first, each to the replica with the least work; in each small to large.
std::vector<MicroBatches> spread(Blocks blocks, size_t replicas);

// Every other one from the last to the first, and the others back: of blocks that come large to small,
// small – large – small.
Blocks hill(const Blocks& blocks);

// Padded micro-batches that come small to large: as they do, large to small, small – large – small, as partitioned.
std::vector<MicroBatches> orders_of_padded(const MicroBatches& batches);

// A hill of the blocks of each mode, merged evenly.
Blocks merged_hills(const Blocks& blocks, size_t modes);

}  // namespace dynapipe
