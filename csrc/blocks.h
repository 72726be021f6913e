// Orders of blocks of micro-batches that a search begins with.
#pragma once

#include <cstdint>
#include <vector>

#include "batches.h"

namespace dynapipe {

// Micro-batches that follow one another: one, or those of a link (Chains).
using Blocks = std::vector<MicroBatches>;

int64_t work_of(const MicroBatches& block);
MicroBatches joined(const Blocks& blocks);

// Every other one from the last to the first, and the others back: of blocks that come large to small,
// small – large – small.
Blocks hill(const Blocks& blocks);

// A hill of the blocks of each mode, merged evenly.
Blocks merged_hills(const Blocks& blocks, size_t modes);

}  // namespace dynapipe
