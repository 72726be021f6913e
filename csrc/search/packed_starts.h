// Packed rows to begin a search with: how many, of which samples, and which recompute mode each takes.
//
// Any samples can share a row. For a size of rows T, and for a level of memory pressure, every sample is given a mode:
// first the one that keeps the least; then, by time saved per byte kept, samples are given modes that keep more, until
// the stage that is shortest of memory is filled to the level by rows in flight. Of long samples attention's inside is
// many bytes for little time, so long and short samples tend to get different modes. The samples of one mode then go to
// rows of about T positions, the largest first, each to the row whose busiest kind of stage it leaves the least work.
#pragma once

#include <vector>

#include "search/batches.h"

namespace dynapipe {

// Every start holds every sample once; those whose rows do not fit are left out.
struct PackedStarts {
    std::vector<MicroBatches> rows;
    // Without the fastest of the modes, where their samples would fill most of the memory: other modes may then mix
    // better.
    std::vector<MicroBatches> without_fastest;
};
PackedStarts packed_starts(const Problem& problem, CostCache& costs, BatchMaker& maker);

// What a batch may take in rows that suit it: the work of the busiest stage and one row's way, within the memory;
// kUnreachable where no mode covers a sample.
int64_t estimated_ns(const Problem& problem, CostCache& costs, BatchMaker& maker);

}  // namespace dynapipe
