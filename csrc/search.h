// Local search over partitions, layouts, recompute modes, replicas, order and policy, on list scheduling's makespan.
// The rules are told in planning/search.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batches.h"
#include "costs.h"
#include "list_schedule.h"
#include "problem.h"

namespace dynapipe {

// One replica's micro-batches in the order in which they enter the pipeline, and how its passes are chosen.
struct ReplicaState {
    MicroBatches micro_batches;
    Policy policy;
    int64_t makespan = 0;
};

// All replicas of a solution and what they come to.
struct Solution {
    std::vector<ReplicaState> replicas;

    int64_t slowest() const {
        int64_t most = 0;
        for (const ReplicaState& replica : replicas) most = std::max(most, replica.makespan);
        return most;
    }
    // The slowest replica's makespan first; a faster other replica is room for later mutations.
    int64_t objective() const {
        int64_t sum = 0;
        for (const ReplicaState& replica : replicas) sum += replica.makespan;
        return slowest() + sum / static_cast<int64_t>(16 * replicas.size());
    }
};

struct Found {
    std::vector<ReplicaState> replicas;      // empty where nothing fits
    std::vector<std::vector<Pass>> orders;  // per replica, [stages][passes]
    int64_t makespan = kUnreachable, begun = kUnreachable;  // of the best start
    int64_t gain = 0;  // of its divided backward passes over whole ones
};

// A padded micro-batch of a partition: samples [first, first + size) of the order.
struct Run {
    int64_t first, size, mode;
};

constexpr int64_t kDefaultEvaluations = -1;

// The best solution from the given partitions of the maker's order and, where rows may be packed, from rows made here;
// where a solution is given, from that alone, in a part of the evaluations.
Found search(const Problem& problem, CostCache& costs, BatchMaker& maker,
             const std::vector<std::vector<Run>>& partitions, int64_t evaluations, uint64_t seed,
             const std::vector<ReplicaState>& given = {});

}  // namespace dynapipe
