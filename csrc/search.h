// Local search over partitions, recompute modes, replicas, order and policy, on list scheduling's makespan.
// The rules are told in planning/search.py.
#pragma once

#include <cstdint>
#include <vector>

#include "costs.h"
#include "list_schedule.h"
#include "partition.h"
#include "problem.h"

namespace dynapipe {

// A micro-batch: samples [first, first + size) of the order.
struct MicroBatch {
    int64_t first, size, mode;
    const PassCosts* costs = nullptr;  // null until looked up
};

// One replica's micro-batches in the order in which they enter the pipeline, and how its passes are chosen.
struct ReplicaState {
    std::vector<MicroBatch> micro_batches;
    Policy policy;
    int64_t makespan = 0;
};

struct Found {
    std::vector<ReplicaState> replicas;          // empty where no partition fits
    std::vector<std::vector<uint8_t>> forwards;  // per replica, see ListScheduler::run
};

// The best solution from the given partitions of an order, whose padded lengths are given.
Found search(const Problem& problem, CostCache& costs, const Lengths& lengths,
             const std::vector<std::vector<MicroBatch>>& partitions, int64_t evaluations, uint64_t seed);

}  // namespace dynapipe
