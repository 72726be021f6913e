// Where searches begin if memory is short: micro-batches that hold less, and what needs the most before pools of
// messages have grown.
#pragma once

#include "costs/problem.h"
#include "search/batches.h"
#include "search/blocks.h"

namespace dynapipe {

// The micro-batches with the first mode, from their own and `fastest` on, under which each fits alone beside messages
// as large as the largest of all; the last mode where none does.
MicroBatches lighter(const Problem& problem, BatchMaker& maker, MicroBatches batches, size_t fastest);

// Every sample on its own; nothing where one does not fit.
MicroBatches alone(const Problem& problem, BatchMaker& maker);

// The blocks whose micro-batches leave a stage the least memory first.
Blocks neediest_first(const Problem& problem, Blocks blocks);

}  // namespace dynapipe
