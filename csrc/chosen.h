// What a search chose, in the form in which it leaves the core and comes back for another search in less memory.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "solution.h"

namespace dynapipe {

// Of a replica: samples of all micro-batches one after another, how many each has, modes, whether packed; the rule, the
// least gap and the depths of its policy.
using Chosen = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<bool>,
                          std::vector<int64_t>>;

Chosen chosen_of(const ReplicaState& replica, const BatchMaker& maker);

// The replicas again; none where a sample does not fit any more. Micro-batches that do not fit take another mode, or are
// halved.
std::vector<ReplicaState> restored(const Problem& problem, const std::vector<Chosen>& given, BatchMaker& maker);

}  // namespace dynapipe
