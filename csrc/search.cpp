#include "search.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "blocks.h"
#include "chains.h"
#include "evaluate.h"
#include "jitter.h"
#include "join_halves.h"
#include "budget.h"
#include "lighten.h"
#include "mutations.h"
#include "packed_starts.h"
#include "policies.h"
#include "tight_starts.h"

namespace dynapipe {
namespace {

constexpr int64_t kLeastGain = 64;  // dividing passes for less than a 64th may lose to a search that does not
constexpr int64_t kStartMargin = 32, kStartMarginOfFew = 3;  // starts longer than the best so far by more than such a part are dropped
constexpr size_t kLightened = 6;  // starts that are tried with modes by stage
constexpr int64_t kFilledRows = 8;  // per stage: starts of at most so many rows that do not fit are tried with modes by stage
constexpr std::initializer_list<double> kAsTheFullest{0}, kAboutFull{0.93}, kFullStages{0, 1.0, 0.93, 0.85};  // parts of memory, the rest for messages
constexpr int64_t kKept = 400;    // modes that keep more are tried so often at the end
constexpr int64_t kAccepted = 2000, kMostIdle = 1000;  // worse by a 2000th is accepted at first; idle changes in a row
constexpr int64_t kJitterPartPacked = 8, kJitterPartPadded = 5;  // of what is left: packed orders gain less by it

// Forwards that stages hold beyond what fills the pipeline; of many starts each is tried with those alone that win most.
constexpr std::initializer_list<int64_t> kExtras{0, 1, 3, 8}, kManyExtras{0, 1, 2, 3, 4, 5, 8};
constexpr std::initializer_list<Rule> kEveryRule{Rule::kBackwardFirst, Rule::kForwardFirst, Rule::kStrict};

class Search {
public:
    Search(const Problem& problem, CostCache& costs, BatchMaker& maker, Division division, int64_t evaluations,
           uint64_t seed)
        : problem_(problem), costs_(costs), maker_(maker), division_(division),
          jittered_(problem.pipeline), chains_(problem), evaluator_(problem, chains_),
          mutations_(problem, maker, chains_, division != Division::kOff, seed), left_(std::max<int64_t>(evaluations, 0)),
          by_default_(evaluations == kDefaultEvaluations) {}

    Found run(const std::vector<std::vector<Run>>& partitions, const std::vector<MicroBatches>& packed, int64_t most);
    std::vector<Solution> starts(const std::vector<std::vector<Run>>& partitions, const std::vector<MicroBatches>& packed,
                                 int64_t most, int64_t filled);

private:
    Found improved(std::vector<Solution> solutions);
    int64_t evaluate(const ReplicaState& replica, int64_t bound, std::vector<uint8_t>* kinds = nullptr) {
        --left_;
        return evaluator_.makespan(replica, bound, kinds);
    }
    Solution assigned(const MicroBatches& batches);
    void lighten(ReplicaState& replica, std::initializer_list<double> limits);
    void begin_padded(ReplicaState& replica);
    void begin_packed(ReplicaState& replica);
    void begin_tight(ReplicaState& replica);
    void try_policies(const MicroBatches& order, std::initializer_list<int64_t> extras,
                      std::initializer_list<Rule> rules, ReplicaState& best);
    void compete(std::vector<Solution>& solutions);
    void improve(Solution& solution, int64_t evaluations);
    bool change(Solution& candidate, int64_t limit);
    void copy_touched(const Solution& from, Solution& to) const;
    int64_t jittered_total(ReplicaState& replica);
    int64_t undivided(const Solution& solution);
    void robustify_policy(ReplicaState& replica);
    void robustify(Solution& solution, int64_t evaluations);
    Policy policy(int64_t extra, Rule rule) const;

    const Problem& problem_;
    CostCache& costs_;
    BatchMaker& maker_;
    const Division division_;
    JitteredReplay jittered_;
    Chains chains_;
    Evaluator evaluator_;
    Mutations mutations_;
    int64_t left_, most_depth_ = kUnreachable;
    bool by_default_;
    std::vector<uint8_t> kinds_;
    std::vector<size_t> touched_;
};

Policy Search::policy(int64_t extra, Rule rule) const {
    return filling_policy(problem_.pipeline, extra, rule, division_ != Division::kOff, most_depth_);
}

void Search::try_policies(const MicroBatches& order, std::initializer_list<int64_t> extras,
                          std::initializer_list<Rule> rules, ReplicaState& best) {
    for (int64_t extra : extras) {
        for (Rule rule : rules) {
            ReplicaState candidate{order, policy(extra, rule), 0};
            candidate.makespan = evaluate(candidate, best.makespan);
            if (candidate.makespan < best.makespan) best = std::move(candidate);
        }
    }
}

// Padded micro-batches, small to large, in a few orders under a few policies, of which one is plain 1F1B.
void Search::begin_padded(ReplicaState& replica) {
    for (const MicroBatches& order : orders_of_padded(replica.micro_batches))
        try_policies(order, kExtras, kEveryRule, replica);
}

// Packed rows, small to large. There are many starts, so each gets the orders and policies that win most.
void Search::begin_packed(ReplicaState& replica) {
    Blocks large_first = chains_.blocks(replica.micro_batches);
    std::reverse(large_first.begin(), large_first.end());
    if (replica.makespan < kUnreachable) {  // A deep and a shallow try tell which are far from the best, or do not fit.
        const int64_t limit = replica.makespan + replica.makespan / kStartMargin;
        ReplicaState first{joined(hill(large_first)), policy(*std::rbegin(kExtras), Rule::kForwardFirst), limit};
        try_policies(first.micro_batches, {0}, {Rule::kBackwardFirst}, first);
        if (first.makespan >= limit && evaluate(first, limit) >= kUnreachable) return;
    }
    Blocks modes_first = large_first;  // in the middle those that keep the least, where most are in flight
    std::stable_sort(modes_first.begin(), modes_first.end(),
                     [](const MicroBatches& a, const MicroBatches& b) { return a[0]->modes > b[0]->modes; });
    for (const Blocks& order : {hill(large_first), hill(modes_first), merged_hills(large_first, problem_.modes.size())})
        try_policies(joined(order), kFewExtras, kFewRules, replica);
}

// Where memory is short: what needs the most comes first, while pools of messages are small, and stages hold few at once.
void Search::begin_tight(ReplicaState& replica) {
    const Blocks order = neediest_first(problem_, chains_.blocks(replica.micro_batches));
    for (int64_t depth : {kUnreachable, int64_t{3}, int64_t{2}, int64_t{1}}) {
        most_depth_ = depth;
        try_policies(joined(order), {0}, kEveryRule, replica);
    }
    most_depth_ = kUnreachable;
}

Solution Search::assigned(const MicroBatches& batches) {
    Solution solution;
    for (MicroBatches& its : spread(chains_.blocks(batches), problem_.replicas)) {
        const int64_t makespan = its.empty() ? 0 : kUnreachable;
        solution.replicas.push_back({std::move(its), policy(0, Rule::kStrict), makespan});
    }
    return solution;
}

// Of those that are not much longer than `most`. Those of at most `filled` rows that are not are tried with fuller stages.
std::vector<Solution> Search::starts(const std::vector<std::vector<Run>>& partitions,
                                     const std::vector<MicroBatches>& packed, int64_t most, int64_t filled) {
    std::vector<Solution> solutions;
    int64_t least = most;
    bool few = false;  // the best has few rows, so each is tried with modes that fill every stage
    const auto add = [&](const MicroBatches& batches, void (Search::*begin)(ReplicaState&)) {
        Solution solution = assigned(batches);
        const int64_t rows = (static_cast<int64_t>(batches.size()) - 1) / problem_.replicas + 1;
        const int64_t margin = rows <= kFewRows ? kStartMarginOfFew : kStartMargin;
        const int64_t limit = least < kUnreachable ? least + least / margin : kUnreachable;
        for (ReplicaState& replica : solution.replicas) {
            if (replica.micro_batches.empty()) return;  // fewer links than replicas
            replica.makespan = limit;
            (this->*begin)(replica);
            if (few && rows <= kFewRows) lighten(replica, kFullStages);
            else if (rows <= filled && replica.makespan >= limit) lighten(replica, kAboutFull);
            if (replica.makespan >= limit) return;
        }
        least = std::min(least, solution.slowest());
        solutions.push_back(std::move(solution));
    };
    std::vector<MicroBatches> padded;
    for (const std::vector<Run>& partition : partitions) {
        MicroBatches& batches = padded.emplace_back();
        for (const Run& run : partition) batches.push_back(maker_.make(BatchMaker::run(run.first, run.size), run.mode, false));
        if (std::count(batches.begin(), batches.end(), nullptr) > 0) padded.pop_back();
    }
    const int64_t left = left_;
    for (;; few = true) {
        least = most;
        solutions.clear();
        for (const MicroBatches& batches : padded) add(batches, &Search::begin_padded);
        for (const MicroBatches& rows : packed) add(rows, &Search::begin_packed);
        if (few || (!solutions.empty() && by_objective(solutions)[0].rows() > kFewRows)) break;
    }
    if (solutions.empty() && most < kUnreachable) return solutions;
    if (solutions.empty())
        for (const std::vector<MicroBatches>* its : {&std::as_const(padded), &packed})
            for (const MicroBatches& each : *its) add(lighter(problem_, maker_, each), &Search::begin_tight);
    if (solutions.empty()) add(lighter(problem_, maker_, alone(problem_, maker_)), &Search::begin_tight);
    by_objective(solutions);
    for (size_t i = 0; i < std::min(solutions.size(), kLightened); ++i)
        for (ReplicaState& replica : solutions[i].replicas) lighten(replica, kAsTheFullest);
    left_ = left;  // what begins a search is not counted
    return std::move(by_objective(solutions));
}

// Takes modes by stage where the replica is faster with them.
void Search::lighten(ReplicaState& replica, std::initializer_list<double> limits) {
    const MicroBatches given = replica.micro_batches;
    for (double limit : limits) {
        ReplicaState lighter = replica;
        lighter.micro_batches = lightened(problem_, maker_, given, limit);
        if (lighter.micro_batches == given) continue;
        lighter.makespan = evaluate(lighter, replica.makespan);
        try_policies(lighter.micro_batches, kFewExtras, kFewRules, lighter);
        if (lighter.makespan < replica.makespan) replica = std::move(lighter);
    }
}

// Improves the best starts in rounds, each with a part of the evaluations, until one is left.
void Search::compete(std::vector<Solution>& solutions) {
    struct Round { size_t solutions; Share evaluations; };
    static constexpr Round kPaddedRounds[] = {{2, {2, 3}}}, kPackedRounds[] = {{6, {1, 5}}, {3, {1, 5}}},
                           kFewRounds[] = {{16, {2, 5}}, {8, {2, 5}}};
    const int64_t evaluations = left_;
    if (by_default_ && evaluations < kLeast / 2) solutions.resize(1);  // of a large batch, which others would not reach
    const auto rounds = !problem_.may_pack ? std::pair(std::begin(kPaddedRounds), std::end(kPaddedRounds))
                        : solutions[0].rows() <= kFewRows ? std::pair(std::begin(kFewRounds), std::end(kFewRounds))
                        : std::pair(std::begin(kPackedRounds), std::end(kPackedRounds));
    for (auto round = rounds.first; round != rounds.second; ++round) {
        solutions.resize(std::min(solutions.size(), round->solutions));
        const int64_t share = evaluations * round->evaluations.parts / round->evaluations.of / static_cast<int64_t>(round->solutions);
        for (Solution& solution : solutions)
            if (share > 0) improve(solution, share);
        by_objective(solutions);
    }
    if (left_ > 0) improve(solutions[0], left_);
}

// Nothing where every start is longer than `most`.
Found Search::run(const std::vector<std::vector<Run>>& partitions, const std::vector<MicroBatches>& packed,
                  int64_t most) {
    std::vector<Solution> solutions = starts(partitions, packed, kUnreachable, kFilledRows * problem_.pipeline.stages);
    if (solutions.empty() || solutions[0].slowest() > most) return {};
    if (by_default_) left_ = default_evaluations(problem_, solutions[0].rows());
    return improved(std::move(solutions));
}

Found Search::improved(std::vector<Solution> solutions) {
    Found found;
    found.started = solutions[0].slowest();
    // A part of what is left is for jitter. With several chunks nothing is replayed under jitter.
    const int64_t part = problem_.may_pack ? kJitterPartPacked : kJitterPartPadded;
    const int64_t robustifying = problem_.pipeline.chunks > 1 ? 0 : std::max<int64_t>(left_, 0) / part;
    left_ -= robustifying;
    const bool searches = left_ > 0;
    compete(solutions);
    Solution& best = solutions[0];
    for (ReplicaState& replica : best.replicas)  // what recomputes for nothing
        if (searches)
            keep_more(maker_, replica.micro_batches, kKept, [&](const MicroBatches& batches) {
                const int64_t makespan = evaluate({batches, replica.policy}, replica.makespan + 1);
                replica.makespan = std::min(replica.makespan, makespan);
                return makespan < kUnreachable;
            });
    if (robustifying > 0) robustify(best, robustifying);
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
void Search::improve(Solution& best, int64_t evaluations) {
    const int64_t until = left_ - evaluations, first = left_;
    Solution current = best;
    Solution candidate = best;  // equal to `current` at the start of every change
    int64_t current_objective = current.objective();
    int64_t best_objective = current_objective;
    const int64_t margin = best_objective / kAccepted;
    evaluator_.keep(current);
    for (int64_t idle = 0; left_ > until && idle < kMostIdle; ++idle) {
        const int64_t before = left_;
        const int64_t allowed = best_objective + margin * (left_ - until) / (first - until);
        const bool taken = change(candidate, std::max(current_objective, allowed));
        if (left_ < before) idle = 0;
        if (!taken) {
            copy_touched(current, candidate);
            continue;
        }
        evaluator_.take(touched_);
        copy_touched(candidate, current);
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
        const bool fits = change(candidate, limit);
        if (left_ < before) idle = 0;
        std::vector<int64_t> changed = totals;
        if (fits)
            for (size_t r : touched_) changed[r] = jittered_total(candidate.replicas[r]);
        if (!fits || sum(changed) >= sum(totals)) {
            copy_touched(best, candidate);
            continue;
        }
        evaluator_.take(touched_);
        copy_touched(candidate, best);
        totals = std::move(changed);
    }
}

void make_packed_rows(const Problem& problem, CostCache& costs, StartingRows& rows) {
    if (problem.may_pack && rows.packed.empty()) rows.packed = packed_starts(problem, costs, rows.maker);
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

Found search(const Problem& problem, CostCache& costs, StartingRows& rows,
             const std::vector<std::vector<Run>>& partitions, int64_t evaluations, uint64_t seed) {
    make_packed_rows(problem, costs, rows);
    const auto run = [&](Division as, int64_t most) {
        return Search(problem, costs, rows.maker, as, evaluations, seed).run(partitions, rows.packed, most);
    };
    Found found = run(problem.division, kUnreachable);
    if (problem.division != Division::kAuto) return found;
    if (evaluations != 0 && found.gain <= found.makespan / kLeastGain) {
        Found whole = run(Division::kOff, found.started + found.started / kLeastGain);
        if (whole.makespan <= found.makespan) return whole;
    }
    join_halves(problem, found);
    return found;
}

}  // namespace dynapipe
