// The makespans of a solution's replicas. A replica that was changed is scheduled from the first micro-batch that
// differs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "costs/problem.h"
#include "schedule/list_schedule.h"
#include "search/chains.h"
#include "search/solution.h"

namespace dynapipe {

class Evaluator {
public:
    Evaluator(const Problem& problem, Chains& chains)
        : problem_(problem), chains_(chains), scheduler_(problem.pipeline) {}

    // kUnreachable from the bound on; `kinds` as ListScheduler::run fills it.
    int64_t makespan(const ReplicaState& replica, int64_t bound, std::vector<uint8_t>* kinds = nullptr) {
        return run(replica, bound, kinds, nullptr, nullptr);
    }

    // Keeps the runs of a solution that is going to be changed.
    void keep(const Solution& solution);
    // The makespan of replica `touched[i]` after a change.
    int64_t makespan_of_changed(const Solution& solution, const std::vector<size_t>& touched, size_t i, int64_t bound);
    // Keeps the runs of the last change.
    void take(const std::vector<size_t>& touched);

    // Of the last replica.
    const ListScheduler::Costs& rows() const { return rows_; }
    std::vector<Pass> order(const std::vector<uint8_t>& kinds) const { return scheduler_.order(kinds); }

private:
    int64_t run(const ReplicaState& replica, int64_t bound, std::vector<uint8_t>* kinds,
                const ListScheduler::Trace* before, ListScheduler::Trace* trace);

    const Problem& problem_;
    Chains& chains_;
    ListScheduler scheduler_;
    ListScheduler::Costs rows_;
    std::vector<uint8_t> scheduled_;
    std::vector<ListScheduler::Trace> kept_, changed_;  // [replicas], [replicas touched]
};

}  // namespace dynapipe
