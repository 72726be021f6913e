// Random changes to a solution; planning/search.py says what each does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "random.h"
#include "search.h"

namespace dynapipe {

class Mutations {
public:
    Mutations(const Problem& problem, uint64_t seed) : problem_(problem), random_(seed) {}

    // Makes one change and names the replicas that it touched; false where the change drawn does not apply, and the
    // solution is then not to be used.
    bool random(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);

private:
    bool reorder(ReplicaState& replica);
    bool shift(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool split(ReplicaState& replica);
    bool merge(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool recompute(ReplicaState& replica);
    bool reassign(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched);
    bool change_policy(ReplicaState& replica);

    const Problem& problem_;
    Random random_;
};

}  // namespace dynapipe
