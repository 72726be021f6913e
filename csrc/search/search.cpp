#include "search/search.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "search/budget.h"
#include "search/join_halves.h"
#include "search/lighten.h"
#include "search/local_search.h"
#include "search/precedents.h"

namespace dynapipe {
namespace {

constexpr int64_t kLeastGain = 64;     // dividing passes for less than a 64th may lose to a search that does not
constexpr int64_t kNotFar = 4;         // a search with fewer choices starts at most such a part later
constexpr int64_t kFilledRows = 8;     // per stage: starts of at most so many rows that do not fit get modes by stage
constexpr Budget kKept{100'000, 400};  // modes that keep more are tried so often at the end
constexpr int64_t kAccepted = 2000;    // worse by such a part is accepted at first
constexpr int64_t kMostIdle = 1000;    // changes in a row that do not apply
constexpr size_t kMostLeftOver = 500;  // micro-batches that no solution holds any more
// A climb of cut samples ends after a part of its evaluations, and at least so many, that gained less than such a part.
constexpr int64_t kWindows = 4;
constexpr int64_t kLeastWindow = 200;
constexpr int64_t kLeastOfWindow = 10'000;
// A plan that follows another begins at most such a part above what is expected of it, has a part of the evaluations,
// and ends at most such a part above.
constexpr int64_t kNearAtFirst = 25, kNearAtLast = 200;
constexpr Share kFollowing{3, 10};
constexpr std::initializer_list<double> kFitting{0, 0.93};  // parts of memory that modes by stage fill, as starts have
constexpr int64_t kJitterPartPacked = 8, kJitterPartPadded = 5;  // of what is left: packed orders gain less by it

// Forwards that stages hold beyond what fills the pipeline, where jitter decides.
constexpr std::initializer_list<int64_t> kManyExtras{0, 1, 2, 3, 4, 5, 8};

}  // namespace

// Improves the best starts in rounds, each with a part of the evaluations, until one is left.
void Search::compete(std::vector<Solution>& solutions) {
    struct Round {
        size_t solutions;
        Share evaluations;
    };
    static constexpr Round kPaddedRounds[] = {{2, {2, 3}}}, kPackedRounds[] = {{6, {1, 5}}, {3, {1, 5}}},
                           kFewRounds[] = {{16, {2, 5}}, {8, {2, 5}}};
    competing_ = &solutions;
    made_for_starts_ = maker_.kept();
    const int64_t evaluations = left_;
    if (by_default_ && evaluations < kLeast / 2) solutions.resize(1);  // of a large batch, which others would not reach
    const auto rounds = !problem_.may_pack ? std::pair(std::begin(kPaddedRounds), std::end(kPaddedRounds))
                        : solutions[0].rows() <= kFewRows
                            ? std::pair(std::begin(kFewRounds), std::end(kFewRounds))
                            : std::pair(std::begin(kPackedRounds), std::end(kPackedRounds));
    int64_t last = evaluations;  // what the rounds do not need is not spent
    for (auto round = rounds.first; round != rounds.second; ++round) {
        solutions.resize(std::min(solutions.size(), round->solutions));
        const int64_t share =
            evaluations * round->evaluations.parts / round->evaluations.of / static_cast<int64_t>(round->solutions);
        for (Solution& solution : solutions) {
            if (share > 0) improve(solution, share);
        }
        by_objective(solutions);
        last -= share * static_cast<int64_t>(round->solutions);
    }
    if (last > 0) improve(solutions[0], last);
}

// Nothing where every start is longer than `most`.
Found Search::run(const std::vector<std::vector<Run>>& partitions, const PackedStarts& packed, int64_t most) {
    std::vector<Solution> solutions = starts(partitions, packed, kUnreachable, kFilledRows * problem_.pipeline.stages);
    if (solutions.empty() || solutions[0].slowest() > most) return {};
    if (by_default_) left_ = default_evaluations(problem_, solutions[0].rows());
    return improved(std::move(solutions));
}

// Nothing where it does not come to about what is expected.
Found Search::follow(const std::vector<std::vector<MicroBatches>>& plans, int64_t expected) {
    const int64_t given = left_, most = expected + expected / kNearAtFirst;
    std::vector<Solution> solutions;
    for (const std::vector<MicroBatches>& replicas : plans) {
        Solution solution;
        for (const MicroBatches& batches : replicas) {
            ReplicaState replica{batches, policy(0, Rule::kStrict), kUnreachable};
            try_policies(batches, kManyExtras, kEveryRule, replica);
            if (replica.makespan > most) lighten(replica, kFitting);
            solution.replicas.push_back(std::move(replica));
        }
        if (solution.slowest() <= most) solutions.push_back(std::move(solution));
    }
    if (solutions.empty()) return {};
    by_objective(solutions);
    left_ = by_default_ ? default_evaluations(problem_, solutions[0].rows()) : given;
    left_ = left_ * kFollowing.parts / kFollowing.of;
    Found found = improved(std::move(solutions));
    return found.makespan <= expected + expected / kNearAtLast ? found : Found{};
}

Found Search::improved(std::vector<Solution> solutions) {
    Found found;
    found.started = solutions[0].slowest();
    // A part of what is left is for jitter. With several chunks nothing is replayed under jitter.
    const int64_t part = problem_.may_pack ? kJitterPartPacked : kJitterPartPadded;
    const int64_t robustifying = problem_.pipeline.chunks > 1 ? 0 : std::max<int64_t>(left_, 0) / part;
    const int64_t evaluations = left_ - robustifying;
    left_ = evaluations;
    compete(solutions);
    Solution& best = solutions[0];
    const bool searches = evaluations > 0;
    for (ReplicaState& replica : best.replicas)  // what recomputes for nothing
        if (searches)
            keep_more(maker_, replica.micro_batches, kKept.evaluations(best.rows() * problem_.chunks()),
                      [&](const MicroBatches& batches) {
                          const int64_t makespan = evaluate({batches, replica.policy}, replica.makespan + 1);
                          replica.makespan = std::min(replica.makespan, makespan);
                          return makespan < kUnreachable;
                      });
    if (searches && robustifying > 0) robustify(best, robustifying);
    found.makespan = best.slowest();
    if (division_ == Division::kAuto) found.gain = undivided(best) - found.makespan;
    for (ReplicaState& replica : best.replicas) {
        found.orders.emplace_back();
        if (replica.micro_batches.empty()) continue;
        evaluate(replica, kUnreachable, &kinds_);
        found.orders.back() = evaluator_.order(kinds_);
    }
    found.replicas = std::move(best.replicas);
    return found;
}

// The makespan of a solution whose backward passes are all whole.
int64_t Search::undivided(const Solution& solution) {
    int64_t slowest = 0;
    for (ReplicaState replica : solution.replicas) {
        replica.policy.least_gap = kUndivided;
        if (!replica.micro_batches.empty()) slowest = std::max(slowest, evaluate(replica, kUnreachable));
    }
    return slowest;
}

// Makes one random change; whether it applies, and leaves an objective of at most `limit`. Names the replicas that it
// touched in `touched_`.
bool Search::change(Solution& candidate, int64_t limit) {
    touched_.clear();
    if (!mutations_.random(candidate.replicas, touched_)) {
        if (!touched_.empty() && mutations_.unfit()) --left_;
        return false;
    }
    for (size_t i = 0; i < touched_.size(); ++i) {
        ReplicaState& replica = candidate.replicas[touched_[i]];
        replica.makespan = 0;
        const int64_t most = i + 1 < touched_.size() ? limit : candidate.most(limit);
        if (!replica.micro_batches.empty()) --left_;
        replica.makespan = evaluator_.makespan_of_changed(candidate, touched_, i, most + 1);
        if (replica.makespan >= kUnreachable) return false;
    }
    return candidate.objective() <= limit;
}

// The replicas that the last change touched.
void Search::copy_touched(const Solution& from, Solution& to) const {
    for (size_t r : touched_) to.replicas[r] = from.replicas[r];
}

// Threshold accepting: a worse solution is taken while it is within a margin of the best that shrinks to nothing. An
// evaluation schedules the changed replicas from the first micro-batch that differs: O(micro-batches · stages) each.
// Cut samples, whose evaluations are long, are left once nothing is gained.
void Search::improve(Solution& best, int64_t evaluations) {
    const int64_t until = left_ - evaluations, first = left_;
    Solution current = best;
    Solution candidate = best;  // equal to `current` at the start of every change
    int64_t current_objective = current.objective();
    int64_t best_objective = current_objective;
    const int64_t margin = best_objective / kAccepted;
    const int64_t window = problem_.is_cut() ? std::max(evaluations / kWindows, kLeastWindow) : evaluations;
    int64_t next_look = left_ - window;
    int64_t objective_then = best_objective;
    evaluator_.keep(current);
    size_t most_kept = maker_.kept() + kMostLeftOver;
    for (int64_t idle = 0; left_ > until && idle < kMostIdle; ++idle) {
        if (left_ <= next_look) {
            if (objective_then - best_objective < best_objective / kLeastOfWindow) break;
            objective_then = best_objective;
            next_look -= window;
        }
        const int64_t before = left_;
        const int64_t allowed = best_objective + margin * (left_ - until) / (first - until);
        const size_t kept = maker_.kept();
        const bool taken = change(candidate, std::max(current_objective, allowed));
        if (left_ < before) idle = 0;
        if (!taken) {
            copy_touched(current, candidate);
            maker_.forget_since(kept);
            continue;
        }
        evaluator_.take(touched_);
        copy_touched(candidate, current);
        current_objective = current.objective();
        if (current_objective < best_objective) {
            best = current;
            best_objective = current_objective;
        }
        if (maker_.kept() > most_kept) {
            forget_all_but(current);
            most_kept = maker_.kept() + kMostLeftOver;
        }
    }
}

// Micro-batches that a climb has made and that it and the other solutions have left behind.
void Search::forget_all_but(const Solution& current) {
    std::vector<const MicroBatches*> held;
    const auto hold = [&](const Solution& solution) {
        for (const ReplicaState& replica : solution.replicas) held.push_back(&replica.micro_batches);
    };
    for (const Solution& solution : *competing_) hold(solution);
    hold(current);
    maker_.forget_since(made_for_starts_, held);
}

// The sum of the makespans of the replica's order over all draws of jitter. A replay costs about half an evaluation.
int64_t Search::jittered_total(ReplicaState& replica) {
    if (replica.micro_batches.empty()) return 0;
    evaluate(replica, kUnreachable, &kinds_);
    left_ -= kJitterDraws / 2;
    return jittered_.total(evaluator_.rows(), kinds_, chains_.turned(replica.micro_batches));
}

// Of the policies that predict no longer a time, the one of the least total under jitter.
void Search::robustify_policy(ReplicaState& replica) {
    if (replica.micro_batches.empty()) return;
    const int64_t makespan = replica.makespan;
    int64_t least = jittered_total(replica);
    for (int64_t extra : kManyExtras) {
        for (Rule rule : kEveryRule) {
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
    evaluator_.keep(best);
    left_ = evaluations;
    Solution candidate = best;  // equal to `best` at the start of every change
    const auto sum = [](const std::vector<int64_t>& values) {
        return std::accumulate(values.begin(), values.end(), int64_t{0});
    };
    for (int64_t idle = 0; left_ > 0 && idle < kMostIdle; ++idle) {
        const int64_t before = left_;
        const size_t kept = maker_.kept();
        const bool fits = change(candidate, limit);
        if (left_ < before) idle = 0;
        std::vector<int64_t> changed = totals;
        if (fits)
            for (size_t r : touched_) changed[r] = jittered_total(candidate.replicas[r]);
        if (!fits || sum(changed) >= sum(totals)) {
            copy_touched(best, candidate);
            maker_.forget_since(kept);
            continue;
        }
        evaluator_.take(touched_);
        copy_touched(candidate, best);
        totals = std::move(changed);
    }
}

namespace {

// Whether memory is short: something is recomputed.
bool recomputes(const Found& found) {
    const auto any = [](const MicroBatch* batch) {
        return std::any_of(batch->modes.begin(), batch->modes.end(), [](uint8_t mode) { return mode > 0; });
    };
    return std::any_of(found.replicas.begin(), found.replicas.end(), [&](const ReplicaState& replica) {
        return std::any_of(replica.micro_batches.begin(), replica.micro_batches.end(), any);
    });
}

// Where memory is short, climbs end far from one another; without some of the choices one may end lower.
std::vector<Freedom> less_free(const Problem& problem) {
    std::vector<Freedom> all;
    if (problem.modes.size() > 1) {
        std::vector<size_t> all_but_the_first(problem.modes.size() - 1);
        std::iota(all_but_the_first.begin(), all_but_the_first.end(), size_t{1});
        all.push_back({std::move(all_but_the_first)});
    }
    if (problem.may_pad && problem.may_pack && !problem.is_cut()) all.push_back({{}, false});
    return all;
}

void make_packed_rows(const Problem& problem, CostCache& costs, StartingRows& rows) {
    if (problem.may_pack && rows.packed.rows.empty()) rows.packed = packed_starts(problem, costs, rows.maker);
}

}  // namespace

std::optional<Start> start(const Problem& problem, CostCache& costs, StartingRows& rows,
                           const std::vector<std::vector<Run>>& partitions, int64_t most) {
    make_packed_rows(problem, costs, rows);
    Search search(problem, costs, rows.maker, problem.division, 0, 0);
    const std::vector<Solution> solutions = search.starts(partitions, rows.packed, most, kFewRows);
    if (solutions.empty()) return std::nullopt;
    return Start{solutions[0].slowest(), solutions[0].rows()};
}

Found follow(const Problem& problem, CostCache& costs, StartingRows& rows, int64_t evaluations, uint64_t seed) {
    if (evaluations == 0) return {};  // of one stage, which begins with rows of least work
    const Followed followed = follow_precedents(problem, costs, rows.maker);
    Search search(problem, costs, rows.maker, problem.division, evaluations, seed);
    Found found = search.follow(followed.plans, followed.expected);
    join_halves(problem, found);
    return found;
}

Found search(const Problem& problem, CostCache& costs, StartingRows& rows,
             const std::vector<std::vector<Run>>& partitions, int64_t evaluations, uint64_t seed) {
    make_packed_rows(problem, costs, rows);
    const auto run = [&](Division as, const PackedStarts& packed, int64_t most) {
        return Search(problem, costs, rows.maker, as, evaluations, seed).run(partitions, packed, most);
    };
    Found found = run(problem.division, rows.packed, kUnreachable);
    if (problem.division == Division::kAuto && evaluations != 0 && found.gain <= found.makespan / kLeastGain) {
        Found whole = run(Division::kOff, rows.packed, found.started + found.started / kLeastGain);
        if (whole.makespan <= found.makespan) found = std::move(whole);
    }
    const int64_t started = found.started;
    for (const Freedom& freedom : less_free(problem)) {
        if (evaluations != kDefaultEvaluations || !recomputes(found)) break;
        rows.maker.restrict_to(freedom);
        const PackedStarts packed = problem.may_pack ? packed_starts(problem, costs, rows.maker) : PackedStarts();
        Found other = run(problem.division, packed, started + started / kNotFar);
        if (other.makespan < found.makespan) found = std::move(other);
    }
    rows.maker.restrict_to({});
    join_halves(problem, found);
    return found;
}

}  // namespace dynapipe
