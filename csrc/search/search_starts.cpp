#include <algorithm>
#include <utility>

#include "search/blocks.h"
#include "search/budget.h"
#include "search/lighten.h"
#include "search/local_search.h"
#include "search/tight_starts.h"

namespace dynapipe {
namespace {

// Starts longer than the best so far by more than such a part are dropped; of few rows, and of others.
constexpr int64_t kStartMarginOfFew = 3;
constexpr int64_t kStartMargin = 32;
constexpr size_t kLightened = 6;    // starts that are tried with modes by stage
constexpr int64_t kManyRows = 150;  // on chunks: starts of more get a single order

// As kFitting.
constexpr std::initializer_list<double> kAboutFull{0.93};
constexpr std::initializer_list<double> kFullStages{0, 1.0, 0.93, 0.85};

// Forwards that stages hold beyond what fills the pipeline, where there are few starts.
constexpr std::initializer_list<int64_t> kExtras{0, 1, 3, 8};

}  // namespace

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
void Search::start_padded(ReplicaState& replica) {
    for (const MicroBatches& order : orders_of_padded(replica.micro_batches))
        try_policies(order, kExtras, kEveryRule, replica);
}

// Packed rows, small to large. There are many starts, so each gets the orders and policies that win most.
void Search::start_packed(ReplicaState& replica) {
    Blocks large_first = chains_.blocks(replica.micro_batches);
    std::reverse(large_first.begin(), large_first.end());
    // A deep and a shallow try tell which are far from the best, or do not fit; what they stall, 1F1B may run.
    const int64_t limit =
        replica.makespan < kUnreachable ? replica.makespan + replica.makespan / kStartMargin : kUnreachable;
    ReplicaState first{joined(hill(large_first)), policy(*std::rbegin(kExtras), Rule::kForwardFirst), limit};
    try_policies(first.micro_batches, {0}, {Rule::kBackwardFirst}, first);
    if (first.makespan >= limit && evaluate(first, limit) >= kUnreachable) {
        const int64_t before = replica.makespan;
        try_policies(first.micro_batches, {0}, {Rule::kStrict}, replica);
        if (replica.makespan >= before) return;
    }
    try_policies(joined(hill(large_first)), kFewExtras, kFewRules, replica);
    if (static_cast<int64_t>(large_first.size()) * problem_.pipeline.chunks > kManyRows) return;
    Blocks modes_first = large_first;  // in the middle those that keep the least, where most are in flight
    std::stable_sort(modes_first.begin(), modes_first.end(), [](const MicroBatches& a, const MicroBatches& b) {
        const Modes &mine = a[0]->modes, &theirs = b[0]->modes;
        const auto [at, other] = std::mismatch(mine.begin(), mine.end(), theirs.begin());
        return at != mine.end() && *at > *other;
    });
    for (const Blocks& order : {hill(modes_first), merged_hills(large_first, problem_.modes.size())})
        try_policies(joined(order), kFewExtras, kFewRules, replica);
}

// Where memory is short: what needs the most comes first, while pools of messages are small, and stages hold few at
// once.
void Search::start_tight(ReplicaState& replica) {
    const Blocks order = neediest_first(problem_, chains_.blocks(replica.micro_batches));
    for (int64_t depth : {kUnreachable, int64_t{3}, int64_t{2}, int64_t{1}}) {
        most_depth_ = depth;
        try_policies(joined(order), {0}, kEveryRule, replica);
    }
    most_depth_ = kUnreachable;
}

Solution Search::assigned(const MicroBatches& batches) {
    Solution solution;
    for (MicroBatches& of_replica : spread(chains_.blocks(batches), problem_.replicas)) {
        const int64_t makespan = of_replica.empty() ? 0 : kUnreachable;
        solution.replicas.push_back({std::move(of_replica), policy(0, Rule::kStrict), makespan});
    }
    return solution;
}

// Of those that are not much longer than `most`. Those of at most `filled` rows that are not are tried with fuller
// stages.
std::vector<Solution> Search::starts(const std::vector<std::vector<Run>>& partitions, const PackedStarts& packed,
                                     int64_t most, int64_t filled) {
    std::vector<Solution> solutions;
    int64_t least = most;
    bool ahead = false;  // a start has to be faster than the best so far
    bool few = false;    // the best has few rows, so each is tried with modes that fill every stage
    const auto add = [&](const MicroBatches& batches, void (Search::*begin)(ReplicaState&)) {
        Solution solution = assigned(batches);
        const int64_t rows = (static_cast<int64_t>(batches.size()) - 1) / problem_.replicas + 1;
        const int64_t margin = rows <= kFewRows ? kStartMarginOfFew : kStartMargin;
        const int64_t limit = ahead || least >= kUnreachable ? least : least + least / margin;
        for (ReplicaState& replica : solution.replicas) {
            if (replica.micro_batches.empty()) return;  // fewer bundles than replicas
            replica.makespan = limit;
            (this->*begin)(replica);
            if (few && rows <= kFewRows)
                lighten(replica, kFullStages);
            else if (rows <= filled && replica.makespan >= limit)
                lighten(replica, kAboutFull);
            if (replica.makespan >= limit) return;
        }
        least = std::min(least, solution.slowest());
        solutions.push_back(std::move(solution));
    };
    std::vector<MicroBatches> padded;
    for (const std::vector<Run>& partition : partitions) {
        MicroBatches& batches = padded.emplace_back();
        for (const Run& run : partition)
            batches.push_back(maker_.make(BatchMaker::run(run.first, run.size), run.mode, false));
        if (std::count(batches.begin(), batches.end(), nullptr) > 0) padded.pop_back();
    }
    const int64_t left = left_;
    for (;; few = true) {
        least = most;
        solutions.clear();
        for (const MicroBatches& batches : padded) add(batches, &Search::start_padded);
        for (const MicroBatches& rows : packed.rows) add(rows, &Search::start_packed);
        ahead = true;
        for (const MicroBatches& rows : packed.without_fastest) add(rows, &Search::start_packed);
        ahead = false;
        if (few || (!solutions.empty() && by_objective(solutions)[0].rows() > kFewRows)) break;
    }
    if (solutions.empty() && most < kUnreachable) return solutions;
    if (solutions.empty())
        for (const std::vector<MicroBatches>* of_layout : {&std::as_const(padded), &packed.rows})
            for (const MicroBatches& batches : *of_layout)
                for (size_t mode = problem_.modes.size(); mode-- > 0;)
                    add(lighter(problem_, maker_, batches, mode), &Search::start_tight);
    if (solutions.empty()) {
        const MicroBatches each = alone(problem_, maker_);
        for (size_t mode = problem_.modes.size(); mode-- > 0;)
            add(lighter(problem_, maker_, each, mode), &Search::start_tight);
    }
    by_objective(solutions);
    for (size_t i = 0; i < std::min(solutions.size(), kLightened); ++i)
        for (ReplicaState& replica : solutions[i].replicas) lighten(replica, kFitting);
    left_ = left;  // what begins a search is not counted
    by_objective(solutions);
    return solutions;
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

}  // namespace dynapipe
