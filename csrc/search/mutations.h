// Random changes to a solution; core/search.py says what each does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "search/batches.h"
#include "search/chains.h"
#include "search/random.h"
#include "search/solution.h"

namespace dynapipe {

class Mutations {
public:
    Mutations(const Problem& problem, BatchMaker& maker, Chains& chains, bool may_divide, uint64_t seed)
        : problem_(problem), maker_(maker), chains_(chains), may_divide_(may_divide), random_(seed) {}

    // Makes one change and names the replicas that it touched, which alone differ from before; false where the change
    // drawn does not apply or a micro-batch would not fit, and those replicas are then not to be used.
    bool random(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);

    // Whether the last change did not apply because a micro-batch would not fit.
    bool unfit() const { return unfit_; }

private:
    // A micro-batch of a solution: its replica, and its place there.
    struct Place {
        size_t replica, index;
    };

    enum class Move {
        kReorder,
        kShift,
        kMoveSample,
        kExchangeSamples,
        kSplit,
        kMerge,
        kRecompute,
        kChangePolicy,
        kChangeLayoutOrPolicy,
        kReassign,
        kReorderBundle,
        kReassignBundle,
        kSingle
    };

    // A change, and how many of all draws take it. The last one of a table needs several replicas. If samples are cut,
    // merging two rows gains most (benchmarks/planning/README.md).
    struct Weighted {
        Move move;
        int64_t weight;
    };
    static constexpr std::array<Weighted, 7> kPaddedMoves{{{Move::kReorder, 3},
                                                           {Move::kShift, 1},
                                                           {Move::kSplit, 1},
                                                           {Move::kMerge, 1},
                                                           {Move::kRecompute, 1},
                                                           {Move::kChangePolicy, 1},
                                                           {Move::kReassign, 2}}};
    static constexpr std::array<Weighted, 8> kPackedMoves{{{Move::kReorder, 4},
                                                           {Move::kMoveSample, 6},
                                                           {Move::kExchangeSamples, 5},
                                                           {Move::kSplit, 1},
                                                           {Move::kMerge, 1},
                                                           {Move::kRecompute, 4},
                                                           {Move::kChangeLayoutOrPolicy, 2},
                                                           {Move::kReassign, 4}}};
    static constexpr std::array<Weighted, 8> kCutMoves{{{Move::kReorder, 2},
                                                        {Move::kMoveSample, 6},
                                                        {Move::kExchangeSamples, 5},
                                                        {Move::kSplit, 1},
                                                        {Move::kMerge, 6},
                                                        {Move::kRecompute, 4},
                                                        {Move::kChangeLayoutOrPolicy, 1},
                                                        {Move::kReassign, 1}}};
    static constexpr std::array<Weighted, 3> kBundleMoves{
        {{Move::kReorderBundle, 2}, {Move::kSingle, 9}, {Move::kReassignBundle, 1}}};

    template <size_t kCount>
    Move draw(const std::array<Weighted, kCount>& moves, size_t replicas);
    bool apply(Move move, std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool one_in(uint64_t odds) { return random_.below(odds) == 0; }
    bool mutate(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool reorder(ReplicaState& replica);
    bool reorder_bundle(ReplicaState& replica);
    bool reassign_bundle(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool shift(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched, size_t index);
    bool move_sample(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched, bool exchange);
    bool split(ReplicaState& replica);
    bool merge(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool recompute(ReplicaState& replica);
    bool exchange_modes(ReplicaState& replica);
    size_t busiest_stage(const ReplicaState& replica);
    bool change_layout(ReplicaState& replica);
    bool reassign(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool change_policy(ReplicaState& replica);

    size_t any(const ReplicaState& replica) { return random_.below(replica.micro_batches.size()); }
    Place another(const std::vector<ReplicaState>& replicas, Place one);
    bool put(const MicroBatch*& slot, const std::vector<int32_t>& samples, const Modes& modes, bool packed);

    const Problem& problem_;
    BatchMaker& maker_;
    Chains& chains_;
    const bool may_divide_;  // backward passes
    Random random_;
    bool unfit_ = false;
    std::vector<int32_t> less_, more_;  // samples of two micro-batches that exchange some
};

}  // namespace dynapipe
