#include "chosen.h"

#include <algorithm>
#include <utility>

#include "checks.h"

namespace dynapipe {
namespace {

// A micro-batch with the first mode from its own on with which it fits, or its halves.
bool add(const Problem& problem, const std::vector<int32_t>& samples, size_t mode, bool packed, BatchMaker& maker,
         MicroBatches& out) {
    for (size_t each = mode; each < problem.modes.size(); ++each) {
        if (const MicroBatch* batch = maker.make(samples, each, packed)) {
            out.push_back(batch);
            return true;
        }
    }
    const auto half = samples.begin() + samples.size() / 2;
    return samples.size() > 1 && add(problem, {samples.begin(), half}, mode, packed, maker, out) &&
           add(problem, {half, samples.end()}, mode, packed, maker, out);
}

void check_policy(const Problem& problem, const std::vector<int64_t>& policy) {
    const bool holds = policy.size() == 2 + problem.stages() && policy[0] >= 0 &&
                       policy[0] < static_cast<int64_t>(Rule::kRules) &&
                       std::all_of(policy.begin() + 2, policy.end(), [](int64_t depth) { return depth >= 1; });
    require(holds, "a policy of every stage");
}

}  // namespace

Chosen chosen_of(const ReplicaState& replica, const BatchMaker& maker) {
    Chosen chosen;
    auto& [samples, sizes, modes, packed, policy] = chosen;
    for (const MicroBatch* batch : replica.micro_batches) {
        for (int32_t place : batch->samples) samples.push_back(maker.sample(place));
        sizes.push_back(batch->samples.size());
        modes.push_back(batch->mode);
        packed.push_back(batch->packed);
    }
    policy = {static_cast<int64_t>(replica.policy.rule), replica.policy.least_gap};
    policy.insert(policy.end(), replica.policy.depth.begin(), replica.policy.depth.end());
    return chosen;
}

std::vector<ReplicaState> restored(const Problem& problem, const std::vector<Chosen>& given, BatchMaker& maker) {
    require(given.empty() || static_cast<int64_t>(given.size()) == problem.replicas, "what every replica runs");
    std::vector<int32_t> place(maker.samples());
    for (size_t i = 0; i < place.size(); ++i) place[maker.sample(i)] = i;
    size_t left = place.size();
    std::vector<ReplicaState> replicas;
    for (const auto& [samples, sizes, modes, packed, policy] : given) {
        check_policy(problem, policy);
        require(modes.size() == sizes.size() && packed.size() == sizes.size(), "a mode and a layout of every micro-batch");
        replicas.push_back({{}, {{policy.begin() + 2, policy.end()}, static_cast<Rule>(policy[0]), policy[1]}, 0});
        auto next = samples.begin();
        for (size_t i = 0; i < sizes.size(); ++i) {
            require(sizes[i] >= 1 && sizes[i] <= samples.end() - next, "samples of every micro-batch");
            require(modes[i] >= 0 && modes[i] < static_cast<int64_t>(problem.modes.size()), "modes that there are");
            std::vector<int32_t> its;
            for (const auto end = next + sizes[i]; next != end; ++next, --left) {
                require(*next >= 0 && *next < static_cast<int64_t>(place.size()) && place[*next] >= 0,
                        "orders that name every sample once");
                its.push_back(std::exchange(place[*next], -1));
            }
            if (!add(problem, its, modes[i], packed[i], maker, replicas.back().micro_batches)) return {};
        }
    }
    require(given.empty() || left == 0, "orders that name every sample once");
    return replicas;
}

}  // namespace dynapipe
