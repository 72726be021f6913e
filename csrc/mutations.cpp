#include "mutations.h"

#include <algorithm>
#include <utility>

namespace dynapipe {
namespace {

// Where the micro-batch is that begins with a sample: (replica, place in its order).
std::pair<size_t, size_t> owner(const std::vector<ReplicaState>& replicas, int64_t first) {
    for (size_t r = 0; r < replicas.size(); ++r)
        for (size_t i = 0; i < replicas[r].micro_batches.size(); ++i)
            if (replicas[r].micro_batches[i].first == first) return {r, i};
    return {0, 0};
}

}  // namespace

// Every draw stands in a statement of its own: C++ does not fix the order in which it evaluates operands.
bool Mutations::random(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    // Half of the time at the slowest replica, which alone decides the iteration's time.
    size_t r = random_.below(replicas.size());
    if (random_.below(2)) {
        r = 0;
        for (size_t other = 1; other < replicas.size(); ++other)
            if (replicas[other].makespan > replicas[r].makespan) r = other;
    }
    ReplicaState& replica = replicas[r];
    if (replica.micro_batches.empty()) return false;
    touched.push_back(r);
    switch (random_.below(replicas.size() > 1 ? 10 : 8)) {
        case 0:
        case 1:
        case 2: return reorder(replica);
        case 3: return shift(replicas, touched);
        case 4: return split(replica);
        case 5: return merge(replicas, touched);
        case 6: return recompute(replica);
        case 7: return change_policy(replica);
        default: return reassign(replicas, touched);
    }
}

bool Mutations::reorder(ReplicaState& replica) {
    const int64_t count = replica.micro_batches.size();
    if (count < 2) return false;
    const int64_t from = random_.below(count);
    int64_t to;
    if (random_.below(2)) {
        to = random_.below(count);
    } else {
        const int64_t distance = 1 + random_.below(3);
        to = random_.below(2) ? from + distance : from - distance;
    }
    if (from == to || to < 0 || to >= count) return false;
    auto& batches = replica.micro_batches;
    if (random_.below(2)) {
        std::swap(batches[from], batches[to]);
    } else if (from < to) {
        std::rotate(batches.begin() + from, batches.begin() + from + 1, batches.begin() + to + 1);
    } else {
        std::rotate(batches.begin() + to, batches.begin() + from, batches.begin() + from + 1);
    }
    return true;
}

// Moves the border between a micro-batch and the next of the order.
bool Mutations::shift(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    const size_t r = touched[0];
    MicroBatch& batch = replicas[r].micro_batches[random_.below(replicas[r].micro_batches.size())];
    const int64_t border = batch.first + batch.size;
    if (border == static_cast<int64_t>(problem_.samples())) return false;
    const auto [other_r, other_i] = owner(replicas, border);
    MicroBatch& other = replicas[other_r].micro_batches[other_i];
    const bool grow = random_.below(2);
    const int64_t room = (grow ? other.size : batch.size) - 1;
    if (room < 1) return false;
    const int64_t by = 1 + random_.below(std::min<int64_t>(room, 4));
    batch.size += grow ? by : -by;
    other.size -= grow ? by : -by;
    other.first += grow ? by : -by;
    batch.costs = other.costs = nullptr;
    if (other_r != r) touched.push_back(other_r);
    return true;
}

bool Mutations::split(ReplicaState& replica) {
    auto& batches = replica.micro_batches;
    MicroBatch& batch = batches[random_.below(batches.size())];
    if (batch.size < 2) return false;
    const int64_t kept = random_.below(2) ? batch.size / 2 : 1 + random_.below(batch.size - 1);
    const MicroBatch rest{batch.first + kept, batch.size - kept, batch.mode};
    batch.size = kept;
    batch.costs = nullptr;
    batches.insert(batches.begin() + random_.below(batches.size() + 1), rest);
    return true;
}

bool Mutations::merge(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    const size_t r = touched[0];
    const size_t i = random_.below(replicas[r].micro_batches.size());
    const MicroBatch batch = replicas[r].micro_batches[i];
    const int64_t border = batch.first + batch.size;
    if (border == static_cast<int64_t>(problem_.samples())) return false;
    const auto [other_r, other_i] = owner(replicas, border);
    auto& others = replicas[other_r].micro_batches;
    if (other_r != r && others.size() == 1) return false;
    MicroBatch& merged = replicas[r].micro_batches[i];
    merged.size += others[other_i].size;
    merged.mode = std::max(merged.mode, others[other_i].mode);
    merged.costs = nullptr;
    others.erase(others.begin() + other_i);
    if (other_r != r) touched.push_back(other_r);
    return true;
}

bool Mutations::recompute(ReplicaState& replica) {
    const int64_t modes = problem_.modes.size();
    if (modes < 2) return false;
    MicroBatch& batch = replica.micro_batches[random_.below(replica.micro_batches.size())];
    batch.mode = (batch.mode + 1 + random_.below(modes - 1)) % modes;
    batch.costs = nullptr;
    return true;
}

// Assigns a micro-batch to another replica, or exchanges two.
bool Mutations::reassign(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    const size_t r = touched[0];
    const size_t other_r = (r + 1 + random_.below(replicas.size() - 1)) % replicas.size();
    auto& mine = replicas[r].micro_batches;
    auto& theirs = replicas[other_r].micro_batches;
    const size_t i = random_.below(mine.size());
    if (random_.below(2) && !theirs.empty()) {
        std::swap(mine[i], theirs[random_.below(theirs.size())]);
    } else {
        if (mine.size() == 1) return false;
        theirs.insert(theirs.begin() + random_.below(theirs.size() + 1), mine[i]);
        mine.erase(mine.begin() + i);
    }
    touched.push_back(other_r);
    return true;
}

bool Mutations::change_policy(ReplicaState& replica) {
    const int64_t stages = problem_.pipeline.stages;
    if (stages < 2 || problem_.pipeline.forward_only) return false;
    if (random_.below(4) == 0) {
        const int64_t rules = static_cast<int64_t>(Rule::kRules), rule = static_cast<int64_t>(replica.policy.rule);
        replica.policy.rule = static_cast<Rule>((rule + 1 + random_.below(rules - 1)) % rules);
        return true;
    }
    int64_t& depth = replica.policy.depth[random_.below(stages - 1)];
    depth += random_.below(2) ? 1 : -1;
    return depth >= 1;
}

}  // namespace dynapipe
