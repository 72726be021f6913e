// Recompute modes by virtual stage: stages near the end of a pipeline hold fewer micro-batches at once, and can keep
// more of each.
//
//     in flight        4  3  2  1
//     one mode         ##########  every stage recomputes what the first one must
//     modes by stage   ##########  ######  ###  #
#pragma once

#include <functional>

#include "search/batches.h"

namespace dynapipe {

// The micro-batches of a replica with modes that keep more on stages that are less full than the fullest, the most time
// saved per byte first, until they are as full; with a `limit`, from the modes that keep the least on, until such a
// part of each stage's memory is full, counting what a pass needs beside what is kept. A stage is as full as
// micro-batches of mean size, as many as fill the pipeline, make it.
MicroBatches lightened(const Problem& problem, BatchMaker& maker, const MicroBatches& batches, double limit);

// Gives micro-batches modes that keep more, on all stages or on one, where `accepts` the micro-batches with them; it is
// asked at most so many times.
void keep_more(BatchMaker& maker, MicroBatches& batches, int64_t most,
               const std::function<bool(const MicroBatches&)>& accepts);

}  // namespace dynapipe
