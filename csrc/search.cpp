#include "search.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "checks.h"
#include "interleave.h"
#include "moves.h"
#include "noise.h"
#include "shape_costs.h"

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
    // The slowest replica's makespan first; a faster other replica is room for later moves.
    int64_t objective() const {
        int64_t sum = 0;
        for (const ReplicaState& replica : replicas) sum += replica.makespan;
        return slowest() + sum / static_cast<int64_t>(16 * replicas.size());
    }
};

class Search {
public:
    Search(const SearchProblem& problem, int64_t evaluations, uint64_t seed)
        : problem_(problem), costs_(problem), scheduler_(problem.shape), interleaved_(problem.shape),
          noise_(problem.shape), moves_(problem, seed), left_(evaluations) {}

    Found run(const std::vector<std::vector<MicroBatch>>& cuts);

private:
    int64_t evaluate(ReplicaState& replica, int64_t bound, std::vector<uint8_t>* forwards = nullptr);
    bool look_up(MicroBatch& batch);
    int64_t work(MicroBatch& batch);
    Solution begin(std::vector<MicroBatch> batches);
    void begin_replica(ReplicaState& replica);
    void improve(Solution& solution, int64_t evaluations);
    bool change(Solution& candidate, int64_t limit);
    int64_t noisy_total(ReplicaState& replica);
    void steady_policy(ReplicaState& replica);
    void steady(Solution& solution, int64_t evaluations);
    Policy policy(int64_t extra, Rule rule) const;

    const SearchProblem& problem_;
    ShapeCosts costs_;
    ListScheduler scheduler_;
    InterleavedScheduler interleaved_;
    NoisyReplay noise_;
    Moves moves_;
    int64_t left_;
    std::vector<const PassCosts*> rows_;
    std::vector<uint8_t> forwards_;
    std::vector<size_t> touched_;
};

bool Search::look_up(MicroBatch& batch) {
    if (!batch.costs) batch.costs = costs_.at(batch);
    return batch.costs;
}

int64_t Search::evaluate(ReplicaState& replica, int64_t bound, std::vector<uint8_t>* forwards) {
    rows_.clear();
    --left_;
    for (MicroBatch& batch : replica.micro_batches) {
        if (!look_up(batch)) return kUnreachable;
        rows_.push_back(batch.costs);
    }
    return problem_.shape.chunks > 1 ? interleaved_.run(rows_, replica.policy, bound, forwards)
                                     : scheduler_.run(rows_, replica.policy, bound, forwards);
}

// What fills the pipeline, and `extra` beyond on all ranks but the last.
Policy Search::policy(int64_t extra, Rule rule) const {
    const int64_t stages = problem_.shape.stages, each = problem_.shape.chunks > 1 ? 2 : 1;
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

// Orders to begin with: small to large, large to small, small – large – small, and as cut, under a few policies, of
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

// Deals a cut to the replicas, the longest micro-batch first, each to the replica with the least work.
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

Found Search::run(const std::vector<std::vector<MicroBatch>>& cuts) {
    std::vector<Solution> solutions;
    for (const std::vector<MicroBatch>& cut : cuts) {
        Solution solution = begin(cut);
        if (solution.slowest() < kUnreachable) solutions.push_back(std::move(solution));
    }
    std::stable_sort(solutions.begin(), solutions.end(),
                     [](const Solution& a, const Solution& b) { return a.objective() < b.objective(); });
    Found found;
    if (solutions.empty()) return found;
    // A fifth of what is left is for noise, then a third for each of the two best starts, the rest for the better.
    // With several chunks nothing is replayed under noise.
    const int64_t steadying = problem_.shape.chunks > 1 ? 0 : std::max<int64_t>(left_, 0) / 5;
    left_ -= steadying;
    const size_t contenders = std::min<size_t>(2, solutions.size());
    const int64_t share = left_ / 3;
    for (size_t i = 0; i < contenders && share > 0; ++i) improve(solutions[i], share);
    Solution& best = contenders > 1 && solutions[1].objective() < solutions[0].objective() ? solutions[1] : solutions[0];
    if (left_ > 0) improve(best, left_);
    if (steadying > 0) steady(best, steadying);
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
    if (!moves_.random(candidate.replicas, touched_)) return false;
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

// The sum over all draws of noise of what the replica's order comes to. A replay costs about half an evaluation.
int64_t Search::noisy_total(ReplicaState& replica) {
    if (replica.micro_batches.empty()) return 0;
    evaluate(replica, kUnreachable, &forwards_);
    left_ -= kNoiseDraws / 2;
    return noise_.total(rows_, forwards_);
}

// Of the policies that predict no longer a time, the one that comes to the least under noise.
void Search::steady_policy(ReplicaState& replica) {
    if (replica.micro_batches.empty()) return;
    const int64_t makespan = replica.makespan;
    int64_t least = noisy_total(replica);
    for (int64_t extra : {0, 1, 2, 3, 4, 5, 8}) {
        for (Rule rule : {Rule::kBackwardFirst, Rule::kForwardFirst, Rule::kStrict}) {
            ReplicaState candidate{replica.micro_batches, policy(extra, rule), 0};
            candidate.makespan = evaluate(candidate, makespan + 1);
            if (candidate.makespan > makespan) continue;
            const int64_t total = noisy_total(candidate);
            if (total >= least) continue;
            least = total;
            replica = std::move(candidate);
        }
    }
}

// Takes what predicts no longer a time and comes to less under noise.
void Search::steady(Solution& best, int64_t evaluations) {
    std::vector<int64_t> totals;
    for (ReplicaState& replica : best.replicas) {
        steady_policy(replica);
        totals.push_back(noisy_total(replica));
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
        for (size_t r : touched_) changed[r] = noisy_total(candidate.replicas[r]);
        if (std::accumulate(changed.begin(), changed.end(), int64_t{0}) >=
            std::accumulate(totals.begin(), totals.end(), int64_t{0}))
            continue;
        best = std::move(candidate);
        totals = std::move(changed);
    }
}

}  // namespace

void SearchProblem::check() const {
    const size_t stages = layers.size();
    require(!inputs.empty() && inputs.size() < (size_t{1} << 24), "between 1 and 2^24 samples");
    require(targets.size() == inputs.size(), "as many target lengths as input lengths");
    for (const auto* lengths : {&inputs, &targets})
        for (int64_t length : *lengths)
            require(length >= 0 && length <= kLargestCoordinate, "lengths from 0 to 2^20");
    require(stages >= 1 && stages <= 4096, "1 to 4096 virtual stages");
    require(shape.chunks == 1 || shape.stages > 1, "several chunks only on several ranks");
    require(static_cast<size_t>(shape.virtual_stages()) == stages, "model state for every rank of the virtual stages");
    for (const auto* flags : {&links.decoder_forward, &links.decoder_backward})
        require(flags->size() == stages - 1, "links between neighbouring stages");
    const size_t links_given = links.gbps.size();
    require(links_given == links.latency_ns.size() && (links_given > 0) == (stages > 1) &&
                (stages == 1 || links_given % (stages - 1) == 0),
            "links between neighbouring stages");
    for (double gbps : links.gbps) require(gbps > 0, "a rate above 0 on every link");
    for (double latency : links.latency_ns) require(latency >= 0 && latency < 1e15, "latencies from 0 to 1e15 ns");
    require(links.bytes_per_position >= 0 && links.bytes_per_position <= kLargestCoordinate * 8, "bytes per position");
    require(replicas >= 1 && replicas <= 65536, "1 to 65536 replicas");
    require(!modes.empty() && modes.size() <= 16, "between 1 and 16 recompute modes");
}

Found search(const SearchProblem& problem, const std::vector<std::vector<MicroBatch>>& cuts, int64_t evaluations,
             uint64_t seed) {
    return Search(problem, evaluations, seed).run(cuts);
}

}  // namespace dynapipe
