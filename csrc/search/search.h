// Local search over partitions, layouts, recompute modes, replicas, order and policy, on list scheduling's makespan.
// The rules are told in core/search.py.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "costs/costs.h"
#include "costs/problem.h"
#include "search/batches.h"
#include "search/packed_starts.h"
#include "search/solution.h"

namespace dynapipe {

struct Found {
    std::vector<ReplicaState> replicas;     // empty where nothing fits
    std::vector<std::vector<Pass>> orders;  // per replica, [stages][passes]
    int64_t makespan = kUnreachable;
};

// A padded micro-batch of a partition: samples [first, first + size) of the order.
struct Run {
    int64_t first, size, mode;
};

constexpr int64_t kDefaultEvaluations = -1;

// What searches in one order of the samples start with, kept: a search often follows the question where it starts.
struct StartingRows {
    StartingRows(const Problem& problem, CostCache& costs, const std::vector<int64_t>& places)
        : order(places), maker(problem, costs, places) {}

    const std::vector<int64_t> order;
    BatchMaker maker;
    PackedStarts packed;
};

// Where a search starts.
struct Start {
    int64_t makespan;  // of the best start
    int64_t rows;      // the most micro-batches of a replica in it
};

// Nothing where no start fits, or none is shorter than `most` or only a little longer.
std::optional<Start> start(const Problem& problem, CostCache& costs, StartingRows& rows,
                           const std::vector<std::vector<Run>>& partitions, int64_t most);

// The solution that follows a precedent of the problem's; nothing where that is not as good as the precedent itself.
// O(evaluations · micro-batches · stages), of which it takes a part.
Found follow(const Problem& problem, CostCache& costs, StartingRows& rows, int64_t evaluations, uint64_t seed);

// The best solution from the given partitions of the order and, where rows may be packed, from rows made here.
// O(evaluations · micro-batches · stages), and as much again for every start.
Found search(const Problem& problem, CostCache& costs, StartingRows& rows,
             const std::vector<std::vector<Run>>& partitions, int64_t evaluations, uint64_t seed);

}  // namespace dynapipe
