#include "search/search.h"

#include <algorithm>
#include <memory>
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
// A climb goes on whose last part gained such a share: little of the best search, much of those it is chosen from.
constexpr double kGainsLittle = 0.005, kGainsMuch = 0.02;
constexpr int64_t kMostLots = 30;
constexpr size_t kDeepest = 16;  // stages: a schedule of more takes long, so they are searched once, and as far
// A climb has not ended whose last part gained such a share, or whose busiest stage waits for such a part of its work.
constexpr double kGainsAtTheEnd = 0.01, kWaits = 0.05;
// A climb of cut samples ends after a part of its evaluations, and at least so many, that gained less than such a part.
constexpr int64_t kWindows = 4;
constexpr int64_t kLeastWindow = 200;
constexpr int64_t kLeastOfWindow = 10'000;
// A plan that follows another begins at most such a part above what is expected of it, has a part of the evaluations,
// and ends at most such a part above.
constexpr int64_t kNearAtFirst = 25, kNearAtLast = 200;
constexpr Share kFollowing{3, 10};
constexpr int64_t kJitterPartPacked = 8, kJitterPartPadded = 5;  // of what is left: packed orders gain less by it

// Forwards that stages hold beyond what fills the pipeline, where jitter decides.
constexpr std::initializer_list<int64_t> kManyExtras{0, 1, 2, 3, 4, 5, 8};

double share_gained(int64_t before, int64_t after) {
    return static_cast<double>(before - after) / before;
}

}  // namespace

// Improves the best starts in rounds, each with a part of the evaluations, until one is left.
void Search::compete() {
    struct Round {
        size_t solutions;
        Share evaluations;
    };
    static constexpr Round kPaddedRounds[] = {{2, {2, 3}}}, kPackedRounds[] = {{6, {1, 5}}, {3, {1, 5}}},
                           kFewRounds[] = {{16, {2, 5}}, {8, {2, 5}}};
    made_for_starts_ = maker_.kept();
    const int64_t evaluations = left_;
    if (by_default_ && evaluations < kLeast / 2)
        solutions_.resize(1);  // of a large batch, which others would not reach
    const auto rounds = !problem_.may_pack ? std::pair(std::begin(kPaddedRounds), std::end(kPaddedRounds))
                        : solutions_[0].rows() <= kFewRows
                            ? std::pair(std::begin(kFewRounds), std::end(kFewRounds))
                            : std::pair(std::begin(kPackedRounds), std::end(kPackedRounds));
    int64_t last = evaluations;  // what the rounds do not need is not spent
    for (auto round = rounds.first; round != rounds.second; ++round) {
        solutions_.resize(std::min(solutions_.size(), round->solutions));
        const int64_t share =
            evaluations * round->evaluations.parts / round->evaluations.of / static_cast<int64_t>(round->solutions);
        for (Solution& solution : solutions_) {
            if (share > 0) improve(solution, share);
        }
        by_objective(solutions_);
        last -= share * static_cast<int64_t>(round->solutions);
    }
    if (last <= 0) return;
    const int64_t before = solutions_[0].objective();
    improve(solutions_[0], last);
    gained_ = share_gained(before, solutions_[0].objective());
}

bool Search::run(const std::vector<std::vector<Run>>& partitions, const PackedStarts& packed, int64_t most) {
    std::vector<Solution> solutions = starts(partitions, packed, kUnreachable, kFilledRows * problem_.pipeline.stages);
    if (solutions.empty() || solutions[0].slowest() > most) return false;
    if (by_default_) left_ = default_evaluations(problem_, solutions[0].rows());
    climb(std::move(solutions));
    return true;
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
    climb(std::move(solutions));
    gained_ = 0;  // it does not go on: what it follows is where others ended
    Found found = finished();
    return found.makespan <= expected + expected / kNearAtLast ? found : Found{};
}

// A part of what is left is for jitter. With several chunks nothing is replayed under jitter.
void Search::climb(std::vector<Solution> solutions) {
    started_ = solutions[0].slowest();
    const int64_t part = problem_.may_pack ? kJitterPartPacked : kJitterPartPadded;
    robustifying_ = problem_.pipeline.chunks > 1 ? 0 : std::max<int64_t>(left_, 0) / part;
    given_ = left_ -= robustifying_;
    solutions_ = std::move(solutions);
    compete();
    solutions_.resize(1);
    gained_at_first_ = gained_;
}

void Search::go_on(double least) {
    for (int64_t lot = 0; by_default_ && problem_.stages() <= kDeepest && gained_ > least && lot < kMostLots; ++lot) {
        const int64_t before = best().objective();
        left_ = given_;
        improve(best(), given_);
        gained_ = share_gained(before, best().objective());
    }
}

Found Search::finished() {
    Found found;
    const bool searches = given_ > 0;
    if (searches) go_on(kGainsLittle);
    for (ReplicaState& replica : best().replicas)  // what recomputes for nothing
        if (searches)
            keep_more(maker_, replica.micro_batches, kKept.evaluations(best().rows() * problem_.chunks()),
                      [&](const MicroBatches& batches) {
                          const int64_t makespan = evaluate({batches, replica.policy}, replica.makespan + 1);
                          replica.makespan = std::min(replica.makespan, makespan);
                          return makespan < kUnreachable;
                      });
    if (searches && robustifying_ > 0) robustify(best(), robustifying_);
    found.makespan = best().slowest();
    for (ReplicaState& replica : best().replicas) {
        found.orders.emplace_back();
        if (replica.micro_batches.empty()) continue;
        evaluate(replica, kUnreachable, &kinds_);
        found.orders.back() = evaluator_.order(kinds_);
    }
    found.replicas = std::move(best().replicas);
    return found;
}

// What divided backward passes gain over whole ones.
int64_t Search::gain() {
    int64_t slowest = 0;
    for (ReplicaState replica : best().replicas) {
        replica.policy.least_gap = kUndivided;
        if (!replica.micro_batches.empty()) slowest = std::max(slowest, evaluate(replica, kUnreachable));
    }
    return slowest - makespan();
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
    for (const Solution& solution : solutions_) hold(solution);
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

bool Search::recomputes() const {
    const auto any = [](const MicroBatch* batch) {
        return std::any_of(batch->modes.begin(), batch->modes.end(), [](uint8_t mode) { return mode > 0; });
    };
    return std::any_of(best().replicas.begin(), best().replicas.end(), [&](const ReplicaState& replica) {
        return std::any_of(replica.micro_batches.begin(), replica.micro_batches.end(), any);
    });
}

// Of the replica whose busiest stage has the most work.
int64_t Search::busiest() const {
    int64_t most = 0;
    for (const ReplicaState& replica : best().replicas) {
        const std::vector<int64_t> work = work_of_stages(problem_, replica.micro_batches);
        most = std::max(most, *std::max_element(work.begin(), work.end()));
    }
    return most;
}

bool Search::is_at_an_end() const {
    if (problem_.stages() > kDeepest || !recomputes()) return true;
    return gained_at_first_ <= kGainsAtTheEnd && makespan() <= busiest() * (1 + kWaits);
}

namespace {

// Where memory is short, climbs end far from one another; without some of the choices one may end lower.
std::vector<Freedom> less_free(const Problem& problem) {
    std::vector<Freedom> all;
    for (size_t left_out = 0; left_out + 1 < problem.modes.size(); ++left_out) {
        std::vector<size_t> others(problem.modes.size());
        std::iota(others.begin(), others.end(), size_t{0});
        others.erase(others.begin() + left_out);
        all.push_back({std::move(others)});
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
    int64_t before_lighter = most;  // modes by stage come last, and make some much faster
    if (most < kUnreachable && problem.stages() <= kDeepest) before_lighter += most / kNotFar;
    const std::vector<Solution> solutions = search.starts(partitions, rows.packed, before_lighter, kFewRows);
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
    std::unique_ptr<Search> best;
    const auto run = [&](Division as, const PackedStarts& packed, int64_t most) {
        auto next = std::make_unique<Search>(problem, costs, rows.maker, as, evaluations, seed);
        if (!next->run(partitions, packed, most)) return;
        next->go_on(kGainsMuch);
        if (!best || next->makespan() < best->makespan()) best = std::move(next);
    };
    run(problem.division, rows.packed, kUnreachable);
    if (!best) return {};
    const int64_t started = best->started();
    if (problem.division == Division::kAuto && evaluations != 0 && best->gain() <= best->makespan() / kLeastGain)
        run(Division::kOff, rows.packed, started + started / kLeastGain);
    for (const Freedom& freedom : less_free(problem)) {
        if (evaluations != kDefaultEvaluations || best->is_at_an_end()) break;
        rows.maker.restrict_to(freedom);
        const PackedStarts packed = problem.may_pack ? packed_starts(problem, costs, rows.maker) : PackedStarts();
        run(problem.division, packed, started + started / kNotFar);
    }
    rows.maker.restrict_to({});
    Found found = best->finished();
    join_halves(problem, found);
    return found;
}

}  // namespace dynapipe
