// The state of one local search: where it starts (search_starts.cpp), and what it does from there (search.cpp).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "schedule/policies.h"
#include "search/chains.h"
#include "search/evaluate.h"
#include "search/jitter.h"
#include "search/mutations.h"
#include "search/search.h"

namespace dynapipe {

// Parts of memory that modes by stage fill, the rest for messages; 0 for as much as on the fullest stage.
constexpr std::initializer_list<double> kFitting{0, 0.93};
constexpr std::initializer_list<Rule> kEveryRule{Rule::kBackwardFirst, Rule::kForwardFirst, Rule::kStrict};

class Search {
public:
    Search(const Problem& problem, CostCache& costs, BatchMaker& maker, Division division, int64_t evaluations,
           uint64_t seed)
        : problem_(problem),
          costs_(costs),
          maker_(maker),
          division_(division),
          jittered_(problem.pipeline),
          chains_(problem),
          evaluator_(problem, chains_),
          mutations_(problem, maker, chains_, division != Division::kOff, seed),
          left_(std::max<int64_t>(evaluations, 0)),
          by_default_(evaluations == kDefaultEvaluations) {}

    Found follow(const std::vector<std::vector<MicroBatches>>& plans, int64_t expected);
    // Whether it has found anything: nothing where every start is longer than `most`.
    bool run(const std::vector<std::vector<Run>>& partitions, const PackedStarts& packed, int64_t most);
    // Climbs on from what `run` has found as long as every lot of as many evaluations gains such a share.
    void go_on(double least);
    // Whether others would hardly come to another end, since memory is plenty or the climb has ended and no stage
    // waits, or would take too long.
    bool is_at_an_end() const;
    // What has been found, as far as it goes.
    Found finished();
    int64_t started() const { return started_; }  // makespan of the best start
    int64_t makespan() const { return best().slowest(); }
    int64_t gain();  // of divided backward passes over whole ones
    std::vector<Solution> starts(const std::vector<std::vector<Run>>& partitions, const PackedStarts& packed,
                                 int64_t most, int64_t filled);

private:
    void climb(std::vector<Solution> solutions);
    Solution& best() { return solutions_[0]; }
    const Solution& best() const { return solutions_[0]; }
    bool recomputes() const;
    int64_t busiest() const;
    int64_t evaluate(const ReplicaState& replica, int64_t bound, std::vector<uint8_t>* kinds = nullptr) {
        --left_;
        return evaluator_.makespan(replica, bound, kinds);
    }
    Solution assigned(const MicroBatches& batches);
    void lighten(ReplicaState& replica, std::initializer_list<double> limits);
    void start_padded(ReplicaState& replica);
    void start_packed(ReplicaState& replica);
    void start_tight(ReplicaState& replica);
    void try_policies(const MicroBatches& order, std::initializer_list<int64_t> extras,
                      std::initializer_list<Rule> rules, ReplicaState& best);
    void compete();
    void improve(Solution& solution, int64_t evaluations);
    bool change(Solution& candidate, int64_t limit);
    void forget_all_but(const Solution& current);
    void copy_touched(const Solution& from, Solution& to) const;
    int64_t jittered_total(ReplicaState& replica);
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
    std::vector<Solution> solutions_;  // that climb, the best first
    int64_t started_ = kUnreachable, given_ = 0, robustifying_ = 0;
    double gained_ = 0;           // share that the last part of the climb gained
    double gained_at_first_ = 0;  // the same before it went on
    int64_t left_, most_depth_ = kUnreachable;
    bool by_default_;
    size_t made_for_starts_ = 0;  // micro-batches, which others may start with, too
    std::vector<uint8_t> kinds_;
    std::vector<size_t> touched_;
};

}  // namespace dynapipe
