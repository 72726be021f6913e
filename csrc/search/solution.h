// A solution of the search: what every replica runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/list_schedule.h"
#include "search/batches.h"

namespace dynapipe {

// Against the mean of all replicas: enough that no gain of the others makes up for a slower iteration of note.
constexpr int64_t kSlowestCounts = 16;

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
    // Micro-batches of the replica that has most.
    int64_t rows() const {
        size_t most = 1;
        for (const ReplicaState& replica : replicas) most = std::max(most, replica.micro_batches.size());
        return most;
    }
    // The slowest replica's makespan first; a faster other replica is room for later mutations.
    int64_t objective() const {
        int64_t sum = 0;
        for (const ReplicaState& replica : replicas) sum += replica.makespan;
        return slowest() + sum / static_cast<int64_t>(kSlowestCounts * replicas.size());
    }
    // The most that a replica whose makespan is 0 may take for an objective within the limit.
    int64_t most(int64_t limit) const {
        const int64_t others = slowest(), parts = kSlowestCounts * replicas.size();
        int64_t sum = 0;
        for (const ReplicaState& replica : replicas) sum += replica.makespan;
        // m + (m + sum) / parts <= limit, rounded down, where it is the slowest; else others + (m + sum) / parts.
        int64_t most = static_cast<int64_t>((static_cast<__int128>(limit) * parts - sum) / (parts + 1)) + 1;
        while (most > 0 && most + (most + sum) / parts > limit) --most;
        if (most < others) most = std::min(others, (limit - others + 1) * parts - sum - 1);
        return std::clamp<int64_t>(most, 0, std::max<int64_t>(limit, 0));
    }
};

// The least objective first.
inline std::vector<Solution>& by_objective(std::vector<Solution>& solutions) {
    std::stable_sort(solutions.begin(), solutions.end(),
                     [](const Solution& a, const Solution& b) { return a.objective() < b.objective(); });
    return solutions;
}

}  // namespace dynapipe
