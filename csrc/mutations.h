// Random changes to a solution; planning/search.py says what each does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "batches.h"
#include "chains.h"
#include "random.h"
#include "solution.h"

namespace dynapipe {

class Mutations {
public:
    Mutations(const Problem& problem, BatchMaker& maker, Chains& chains, bool may_divide, uint64_t seed)
        : problem_(problem), maker_(maker), chains_(chains), may_divide_(may_divide), random_(seed) {}

    // Makes one change and names the replicas that it touched; false where the change drawn does not apply or a
    // micro-batch would not fit, and the solution is then not to be used.
    bool random(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);

    // Whether the last change did not apply because a micro-batch would not fit.
    bool unfit() const { return unfit_; }

private:
    // A micro-batch of a solution: its replica, and its place there.
    struct Place {
        size_t replica, index;
    };

    bool mutate(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool mutate_padded(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool mutate_packed(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool reorder(ReplicaState& replica);
    bool reorder_link(ReplicaState& replica);
    bool reassign_link(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool shift(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched, size_t index);
    bool move_sample(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched, bool exchange);
    bool split(ReplicaState& replica);
    bool merge(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool recompute(ReplicaState& replica);
    bool change_layout(ReplicaState& replica);
    bool reassign(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool change_policy(ReplicaState& replica);

    size_t any(const ReplicaState& replica) { return random_.below(replica.micro_batches.size()); }
    Place another(const std::vector<ReplicaState>& replicas, Place one);
    bool put(const MicroBatch*& slot, std::vector<int32_t> samples, size_t mode, bool packed);

    const Problem& problem_;
    BatchMaker& maker_;
    Chains& chains_;
    const bool may_divide_;  // backward passes
    Random random_;
    bool unfit_ = false;
};

}  // namespace dynapipe
