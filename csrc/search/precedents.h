// Plans of other batches, followed: their rows, in their order and under their modes, take this batch's samples.
//
//     rows of another batch's plan     ▒▒▒▒▒ ▒▒▒ ▒▒▒▒▒▒▒     their parts of its positions: the room
//     this batch's samples             ▇▇▇ ▇▇▇ ▇ ▇▇ ▇▇ ▇     the longest first, each to the row with the most room left
#pragma once

#include <vector>

#include "search/batches.h"

namespace dynapipe {

struct Followed {
    std::vector<std::vector<MicroBatches>> plans;  // [those whose rows can run][replicas]
    int64_t expected =
        0;  // ns: as near to what this batch is estimated to take as the best of the plans came to its own
};

Followed follow_precedents(const Problem& problem, CostCache& costs, BatchMaker& maker);

}  // namespace dynapipe
