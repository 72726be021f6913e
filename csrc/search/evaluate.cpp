#include "search/evaluate.h"

#include "checks.h"
#include "schedule/transfers.h"

namespace dynapipe {

int64_t Evaluator::run(const ReplicaState& replica, int64_t bound, std::vector<uint8_t>* kinds,
                       const ListScheduler::Trace* before, ListScheduler::Trace* trace) {
    rows_.clear();
    for (const MicroBatch* batch : replica.micro_batches) rows_.push_back(batch->costs());
    const std::vector<int32_t>& turned = chains_.turned(replica.micro_batches);
    if (problem_.pipeline.transfers.are_plain())
        return scheduler_.run(rows_, replica.policy, bound, kinds, turned, before, trace);
    const int64_t makespan = scheduler_.run(rows_, replica.policy, bound, &scheduled_, turned);
    if (makespan >= bound) return makespan;
    if (kinds) *kinds = scheduled_;
    // The order is that of transfers that wait for nothing, and takes at least as long with those that do.
    const Simulation run = simulate_transfers(problem_.pipeline, rows_, scheduler_.order(scheduled_));
    return run.stalled || run.makespan >= bound ? kUnreachable : run.makespan;
}

void Evaluator::keep(const Solution& solution) {
    kept_.resize(solution.replicas.size());
    changed_.resize(kept_.size());
    for (size_t r = 0; r < kept_.size(); ++r)
        if (!solution.replicas[r].micro_batches.empty())
            run(solution.replicas[r], kUnreachable, nullptr, nullptr, &kept_[r]);
}

int64_t Evaluator::makespan_of_changed(const Solution& solution, const std::vector<size_t>& touched, size_t i,
                                       int64_t bound) {
    const ReplicaState& replica = solution.replicas[touched[i]];
    changed_[i].begin(0);
    if (replica.micro_batches.empty()) return 0;
    return run(replica, bound, nullptr, &kept_[touched[i]], &changed_[i]);
}

void Evaluator::take(const std::vector<size_t>& touched) {
    for (size_t i = 0; i < touched.size(); ++i) changed_[i].replace(kept_[touched[i]]);
}

}  // namespace dynapipe
