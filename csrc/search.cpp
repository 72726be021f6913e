#include "search.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "checks.h"
#include "jitter.h"
#include "mutations.h"
#include "transfers.h"

namespace dynapipe {
namespace {

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

class Search {
public:
    Search(const Problem& problem, CostCache& costs, const Lengths& lengths, int64_t evaluations, uint64_t seed)
        : problem_(problem), costs_(costs), lengths_(lengths), scheduler_(problem.pipeline),
          jittered_(problem.pipeline), mutations_(problem, seed), left_(evaluations) {}

    Found run(const std::vector<std::vector<MicroBatch>>& partitions);

private:
    int64_t evaluate(ReplicaState& replica, int64_t bound, std::vector<uint8_t>* forwards = nullptr);
    bool look_up(MicroBatch& batch);
    int64_t work(MicroBatch& batch);
    Solution begin(std::vector<MicroBatch> batches);
    void begin_replica(ReplicaState& replica);
    void improve(Solution& solution, int64_t evaluations);
    bool change(Solution& candidate, int64_t limit);
    int64_t jittered_total(ReplicaState& replica);
    void robustify_policy(ReplicaState& replica);
    void robustify(Solution& solution, int64_t evaluations);
    Policy policy(int64_t extra, Rule rule) const;

    const Problem& problem_;
    CostCache& costs_;
    const Lengths& lengths_;
    ListScheduler scheduler_;
    JitteredReplay jittered_;
    Mutations mutations_;
    int64_t left_;
    std::vector<const PassCosts*> rows_;
    std::vector<uint8_t> forwards_, scheduled_;
    std::vector<size_t> touched_;
};

bool Search::look_up(MicroBatch& batch) {
    if (batch.costs) return true;
    Shape shape{batch.size, 0, 0};
    for (int64_t i = batch.first; i < batch.first + batch.size; ++i) {
        shape.input = std::max(shape.input, lengths_.inputs[i]);
        shape.target = std::max(shape.target, lengths_.targets[i]);
    }
    const CostRow& row = costs_.row(batch.mode, shape);
    if (row.fits) batch.costs = &row.costs;
    return row.fits;
}

int64_t Search::evaluate(ReplicaState& replica, int64_t bound, std::vector<uint8_t>* forwards) {
    rows_.clear();
    --left_;
    for (MicroBatch& batch : replica.micro_batches) {
        if (!look_up(batch)) return kUnreachable;
        rows_.push_back(batch.costs);
    }
    const bool is_plain = problem_.pipeline.transfers.are_plain();
    const int64_t makespan = scheduler_.run(rows_, replica.policy, bound, is_plain ? forwards : &scheduled_);
    if (is_plain || makespan >= bound) return makespan;
    if (forwards) *forwards = scheduled_;
    // The order is that of transfers that wait for nothing, and takes at least as long with those that do.
    std::vector<PassCosts> costs;
    for (const PassCosts* row : rows_) costs.push_back(*row);
    const Simulation run = simulate_transfers(problem_.pipeline, costs, scheduler_.order(scheduled_));
    return run.stalled ? kUnreachable : run.makespan;
}

// The depths that fill the pipeline, and `extra` beyond them on all stages but the last.
Policy Search::policy(int64_t extra, Rule rule) const {
    const int64_t stages = problem_.pipeline.stages, each = problem_.pipeline.chunks > 1 ? 2 : 1;
    Policy policy{{}, rule};
    for (int64_t s = 0; s + 1 < stages; ++s) policy.depth.push_back(each * (stages - 1 - s) + 1 + extra);
    policy.depth.push_back(1);
    return policy;
}

// Time on all stages together.
int64_t Search::work(MicroBatch& batch) {
    int64_t sum = 0;
    for (size_t v = 0; v < problem_.layers.size(); ++v) sum += batch.costs->forward[v] + batch.costs->backward[v];
    return sum;
}

// Orders to begin with: small to large, large to small, small – large – small, and as partitioned, under a few policies, of
// which one is plain 1F1B; the best is kept. The micro-batches come small to large.
void Search::begin_replica(ReplicaState& replica) {
    std::vector<std::vector<MicroBatch>> orders(4);
    orders[0] = replica.micro_batches;
    orders[1].assign(orders[0].rbegin(), orders[0].rend());
    for (size_t i = 0; i < orders[0].size(); i += 2) orders[2].push_back(orders[0][i]);
    for (size_t i = orders[0].size() / 2 * 2; i > 0; i -= 2) orders[2].push_back(orders[0][i - 1]);
    orders[3] = orders[0];
    std::sort(orders[3].begin(), orders[3].end(),
              [](const MicroBatch& a, const MicroBatch& b) { return a.first < b.first; });
    ReplicaState best = replica;
    best.makespan = kUnreachable;
    for (const std::vector<MicroBatch>& order : orders) {
        for (int64_t extra : {0, 1, 3, 8}) {
            for (Rule rule : {Rule::kBackwardFirst, Rule::kForwardFirst, Rule::kStrict}) {
                ReplicaState candidate{order, policy(extra, rule), 0};
                candidate.makespan = evaluate(candidate, best.makespan);
                if (candidate.makespan < best.makespan) best = std::move(candidate);
            }
        }
    }
    replica = std::move(best);
}

// Assigns a partition to the replicas, the longest micro-batch first, each to the replica with the least work.
Solution Search::begin(std::vector<MicroBatch> batches) {
    Solution solution;
    solution.replicas.resize(problem_.replicas);
    std::vector<std::pair<int64_t, size_t>> by_work;
    for (size_t i = 0; i < batches.size(); ++i) {
        if (!look_up(batches[i])) {
            solution.replicas[0].makespan = kUnreachable;
            return solution;
        }
        by_work.emplace_back(work(batches[i]), i);
    }
    std::sort(by_work.begin(), by_work.end());
    std::vector<int64_t> load(problem_.replicas, 0);
    for (size_t i = by_work.size(); i-- > 0;) {
        const size_t r = std::min_element(load.begin(), load.end()) - load.begin();
        load[r] += by_work[i].first;
        solution.replicas[r].micro_batches.push_back(batches[by_work[i].second]);
    }
    for (ReplicaState& replica : solution.replicas) {
        std::reverse(replica.micro_batches.begin(), replica.micro_batches.end());
        replica.policy = policy(0, Rule::kStrict);
        if (!replica.micro_batches.empty()) begin_replica(replica);
    }
    return solution;
}

Found Search::run(const std::vector<std::vector<MicroBatch>>& partitions) {
    std::vector<Solution> solutions;
    for (const std::vector<MicroBatch>& partition : partitions) {
        Solution solution = begin(partition);
        if (solution.slowest() < kUnreachable) solutions.push_back(std::move(solution));
    }
    std::stable_sort(solutions.begin(), solutions.end(),
                     [](const Solution& a, const Solution& b) { return a.objective() < b.objective(); });
    Found found;
    if (solutions.empty()) return found;
    // A fifth of what is left is for jitter, then a third for each of the two best starts, the rest for the better.
    // With several chunks nothing is replayed under jitter.
    const int64_t robustifying = problem_.pipeline.chunks > 1 ? 0 : std::max<int64_t>(left_, 0) / 5;
    left_ -= robustifying;
    const size_t contenders = std::min<size_t>(2, solutions.size());
    const int64_t share = left_ / 3;
    for (size_t i = 0; i < contenders && share > 0; ++i) improve(solutions[i], share);
    Solution& best = contenders > 1 && solutions[1].objective() < solutions[0].objective() ? solutions[1] : solutions[0];
    if (left_ > 0) improve(best, left_);
    if (robustifying > 0) robustify(best, robustifying);
    for (ReplicaState& replica : best.replicas) {
        found.forwards.emplace_back();
        if (!replica.micro_batches.empty()) evaluate(replica, kUnreachable, &found.forwards.back());
    }
    found.replicas = std::move(best.replicas);
    return found;
}

// Makes one random change; whether it applies, and leaves an objective of at most `limit`. Names the replicas that it
// touched in `touched_`.
bool Search::change(Solution& candidate, int64_t limit) {
    touched_.clear();
    if (!mutations_.random(candidate.replicas, touched_)) return false;
    for (size_t r : touched_) {
        ReplicaState& replica = candidate.replicas[r];
        replica.makespan = replica.micro_batches.empty() ? 0 : evaluate(replica, limit + 1);
        if (replica.makespan >= kUnreachable) return false;
    }
    return candidate.objective() <= limit;
}

// Threshold accepting: a worse solution is taken while it is within a margin of the best that shrinks to nothing.
void Search::improve(Solution& best, int64_t evaluations) {
    const int64_t until = left_ - evaluations, first = left_;
    Solution current = best;
    int64_t current_objective = current.objective(), best_objective = current_objective;
    const int64_t margin = best_objective / 2000;
    for (int64_t idle = 0; left_ > until && idle < 1000; ++idle) {
        Solution candidate = current;
        const int64_t before = left_;
        const int64_t allowed = best_objective + margin * (left_ - until) / (first - until);
        const bool taken = change(candidate, std::max(current_objective, allowed));
        if (left_ < before) idle = 0;
        if (!taken) continue;
        current = std::move(candidate);
        current_objective = current.objective();
        if (current_objective < best_objective) {
            best = current;
            best_objective = current_objective;
        }
    }
}

// The sum of the makespans of the replica's order over all draws of jitter. A replay costs about half an evaluation.
int64_t Search::jittered_total(ReplicaState& replica) {
    if (replica.micro_batches.empty()) return 0;
    evaluate(replica, kUnreachable, &forwards_);
    left_ -= kJitterDraws / 2;
    return jittered_.total(rows_, forwards_);
}

// Of the policies that predict no longer a time, the one of the least total under jitter.
void Search::robustify_policy(ReplicaState& replica) {
    if (replica.micro_batches.empty()) return;
    const int64_t makespan = replica.makespan;
    int64_t least = jittered_total(replica);
    for (int64_t extra : {0, 1, 2, 3, 4, 5, 8}) {
        for (Rule rule : {Rule::kBackwardFirst, Rule::kForwardFirst, Rule::kStrict}) {
            ReplicaState candidate{replica.micro_batches, policy(extra, rule), 0};
            candidate.makespan = evaluate(candidate, makespan + 1);
            if (candidate.makespan > makespan) continue;
            const int64_t total = jittered_total(candidate);
            if (total >= least) continue;
            least = total;
            replica = std::move(candidate);
        }
    }
}

// Accepts mutations that predict no longer a time and a smaller total under jitter.
void Search::robustify(Solution& best, int64_t evaluations) {
    std::vector<int64_t> totals;
    for (ReplicaState& replica : best.replicas) {
        robustify_policy(replica);
        totals.push_back(jittered_total(replica));
    }
    const int64_t limit = best.objective();
    left_ = evaluations;
    for (int64_t idle = 0; left_ > 0 && idle < 1000; ++idle) {
        Solution candidate = best;
        const int64_t before = left_;
        const bool fits = change(candidate, limit);
        if (left_ < before) idle = 0;
        if (!fits) continue;
        std::vector<int64_t> changed = totals;
        for (size_t r : touched_) changed[r] = jittered_total(candidate.replicas[r]);
        if (std::accumulate(changed.begin(), changed.end(), int64_t{0}) >=
            std::accumulate(totals.begin(), totals.end(), int64_t{0}))
            continue;
        best = std::move(candidate);
        totals = std::move(changed);
    }
}

}  // namespace

Found search(const Problem& problem, CostCache& costs, const Lengths& lengths,
             const std::vector<std::vector<MicroBatch>>& partitions, int64_t evaluations, uint64_t seed) {
    return Search(problem, costs, lengths, evaluations, seed).run(partitions);
}

}  // namespace dynapipe
