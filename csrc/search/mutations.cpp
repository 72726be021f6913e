#include "search/mutations.h"

#include <algorithm>
#include <utility>

namespace dynapipe {
namespace {

constexpr size_t kNowhere = ~size_t{0};

// Odds, one in so many. None of them was found to matter much: what counts is that every change is drawn often enough.
constexpr uint64_t kLayoutChanges = 4, kDivisionChanges = 4, kRuleChanges = 4;  // else a depth of the policy changes
constexpr uint64_t kOtherReplicas = 3;                                          // of exchanges between micro-batches

constexpr int64_t kFarthest = 3;     // places of an order that a short move goes
constexpr int64_t kMostShifted = 4;  // samples that a border between padded micro-batches moves over at once
constexpr int64_t kMostGaps = 5;     // values of `Policy::least_gap`: quarters of a second half's time, from 0

// Where the padded micro-batch is that begins with a sample: (replica, place in its order).
std::pair<size_t, size_t> owner(const std::vector<ReplicaState>& replicas, int32_t first) {
    for (size_t r = 0; r < replicas.size(); ++r)
        for (size_t i = 0; i < replicas[r].micro_batches.size(); ++i) {
            const MicroBatch& batch = *replicas[r].micro_batches[i];
            if (!batch.packed && batch.samples.front() == first) return {r, i};
        }
    return {kNowhere, 0};
}

}  // namespace

// Every draw stands in a statement of its own: C++ does not fix the order in which it evaluates operands.
bool Mutations::random(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    // Half of the time at the slowest replica, which alone decides the iteration's time.
    unfit_ = false;
    size_t r = random_.below(replicas.size());
    if (random_.below(2)) {
        r = 0;
        for (size_t other = 1; other < replicas.size(); ++other)
            if (replicas[other].makespan > replicas[r].makespan) r = other;
    }
    if (replicas[r].micro_batches.empty()) return false;
    touched.push_back(r);
    if (!mutate(replicas, touched)) return false;
    return !problem_.is_cut() || std::all_of(touched.begin(), touched.end(), [&](size_t replica) {
        return chains_.hold(replicas[replica].micro_batches);
    });
}

bool Mutations::mutate(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    if (problem_.is_cut()) {  // bundles move whole, besides what single micro-batches and samples do
        const Move move = draw(kBundleMoves, replicas.size());
        if (move != Move::kSingle) return apply(move, replicas, touched);
        return apply(draw(kCutMoves, replicas.size()), replicas, touched);
    }
    return apply(problem_.may_pack ? draw(kPackedMoves, replicas.size()) : draw(kPaddedMoves, replicas.size()),
                 replicas, touched);
}

template <size_t kCount>
Mutations::Move Mutations::draw(const std::array<Weighted, kCount>& moves, size_t replicas) {
    int64_t weights = 0;
    for (const Weighted& each : moves) weights += each.weight;
    if (replicas == 1) weights -= moves.back().weight;
    int64_t left = random_.below(weights);
    for (const Weighted& each : moves)
        if ((left -= each.weight) < 0) return each.move;
    return moves.back().move;
}

bool Mutations::apply(Move move, std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    ReplicaState& replica = replicas[touched[0]];
    switch (move) {
        case Move::kReorder:
            return reorder(replica);
        case Move::kShift:
            return shift(replicas, touched, any(replica));
        case Move::kMoveSample:
            return move_sample(replicas, touched, false);
        case Move::kExchangeSamples:
            return move_sample(replicas, touched, true);
        case Move::kSplit:
            return split(replica);
        case Move::kMerge:
            return merge(replicas, touched);
        case Move::kRecompute:
            return recompute(replica);
        case Move::kChangePolicy:
            return change_policy(replica);
        case Move::kChangeLayoutOrPolicy:
            return problem_.may_pad && one_in(kLayoutChanges) ? change_layout(replica) : change_policy(replica);
        case Move::kReassign:
            return reassign(replicas, touched);
        case Move::kReorderBundle:
            return reorder_bundle(replica);
        case Move::kReassignBundle:
            return reassign_bundle(replicas, touched);
        case Move::kSingle:
            break;
    }
    return false;
}

bool Mutations::put(const MicroBatch*& slot, const std::vector<int32_t>& samples, const Modes& modes, bool packed) {
    slot = maker_.make(samples, modes, packed, slot);
    unfit_ = !slot;
    return slot;
}

// A micro-batch other than the given one: a third of the time of another replica. The given one where there is none.
Mutations::Place Mutations::another(const std::vector<ReplicaState>& replicas, Place one) {
    if (replicas.size() > 1 && one_in(kOtherReplicas)) {
        const size_t r = (one.replica + 1 + random_.below(replicas.size() - 1)) % replicas.size();
        if (!replicas[r].micro_batches.empty()) return {r, any(replicas[r])};
    }
    const size_t count = replicas[one.replica].micro_batches.size();
    if (count < 2) return one;
    return {one.replica, (one.index + 1 + random_.below(count - 1)) % count};
}

bool Mutations::reorder(ReplicaState& replica) {
    const int64_t count = replica.micro_batches.size();
    if (count < 2) return false;
    const int64_t from = random_.below(count);
    int64_t to;
    if (random_.below(2)) {
        to = random_.below(count);
    } else {
        const int64_t distance = 1 + random_.below(kFarthest);
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

// Moves a bundle to another place, its micro-batches one after another there.
bool Mutations::reorder_bundle(ReplicaState& replica) {
    auto& batches = replica.micro_batches;
    const std::vector<size_t> places = chains_.bundle(batches, any(replica));
    if (places.size() == batches.size()) return false;
    MicroBatches moved;
    for (size_t place : places) moved.push_back(batches[place]);
    for (size_t i = places.size(); i-- > 0;) batches.erase(batches.begin() + places[i]);
    const size_t to = random_.below(batches.size() + 1);
    batches.insert(batches.begin() + to, moved.begin(), moved.end());
    return true;
}

// Assigns a bundle to another replica.
bool Mutations::reassign_bundle(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    auto& mine = replicas[touched[0]].micro_batches;
    const size_t other_r = (touched[0] + 1 + random_.below(replicas.size() - 1)) % replicas.size();
    auto& theirs = replicas[other_r].micro_batches;
    const std::vector<size_t> places = chains_.bundle(mine, any(replicas[touched[0]]));
    if (places.size() == mine.size()) return false;
    MicroBatches moved;
    for (size_t place : places) moved.push_back(mine[place]);
    for (size_t i = places.size(); i-- > 0;) mine.erase(mine.begin() + places[i]);
    const size_t to = random_.below(theirs.size() + 1);
    theirs.insert(theirs.begin() + to, moved.begin(), moved.end());
    touched.push_back(other_r);
    return true;
}

// Moves the border between a padded micro-batch and the next of the order.
bool Mutations::shift(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched, size_t index) {
    const MicroBatch* const batch = replicas[touched[0]].micro_batches[index];
    const auto [other_r, other_i] = owner(replicas, batch->samples.back() + 1);
    if (other_r == kNowhere) return false;
    const MicroBatch* const other = replicas[other_r].micro_batches[other_i];
    const bool grow = random_.below(2);
    const int64_t room = (grow ? other : batch)->samples.size() - 1;
    if (room < 1) return false;
    const int64_t by = 1 + random_.below(std::min(room, kMostShifted));
    std::vector<int32_t> mine = batch->samples, theirs = other->samples;
    if (grow) {
        mine.insert(mine.end(), theirs.begin(), theirs.begin() + by);
        theirs.erase(theirs.begin(), theirs.begin() + by);
    } else {
        theirs.insert(theirs.begin(), mine.end() - by, mine.end());
        mine.erase(mine.end() - by, mine.end());
    }
    if (other_r != touched[0]) touched.push_back(other_r);
    return put(replicas[touched[0]].micro_batches[index], mine, batch->modes, false) &&
           put(replicas[other_r].micro_batches[other_i], theirs, other->modes, false);
}

// Moves a sample to another micro-batch, or exchanges two.
bool Mutations::move_sample(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched, bool exchange) {
    const Place from{touched[0], any(replicas[touched[0]])};
    const MicroBatch* const mine = replicas[from.replica].micro_batches[from.index];
    if (!mine->packed) return shift(replicas, touched, from.index);
    const Place to = another(replicas, from);
    const MicroBatch* const theirs = replicas[to.replica].micro_batches[to.index];
    if (theirs == mine || (!exchange && mine->samples.size() < 2)) return false;
    less_ = mine->samples;
    more_ = theirs->samples;
    const size_t given = random_.below(less_.size());
    if (exchange) {
        std::swap(less_[given], more_[random_.below(more_.size())]);
    } else {
        more_.push_back(less_[given]);
        less_.erase(less_.begin() + given);
    }
    if (to.replica != from.replica) touched.push_back(to.replica);
    return put(replicas[from.replica].micro_batches[from.index], less_, mine->modes, mine->packed) &&
           put(replicas[to.replica].micro_batches[to.index], more_, theirs->modes, theirs->packed);
}

// A padded micro-batch is split at a place of the order, a packed one at random.
bool Mutations::split(ReplicaState& replica) {
    auto& batches = replica.micro_batches;
    const size_t index = any(replica);
    const MicroBatch* const batch = batches[index];
    const int64_t size = batch->samples.size();
    if (size < 2) return false;
    std::vector<int32_t> kept = batch->samples, rest;
    if (batch->packed) {
        const int64_t eighths = 1 + random_.below(7);
        kept.clear();
        for (int32_t sample : batch->samples) (random_.below(8) < eighths ? kept : rest).push_back(sample);
        if (kept.empty() || rest.empty()) return false;
    } else {
        const int64_t count = random_.below(2) ? size / 2 : 1 + random_.below(size - 1);
        rest.assign(kept.begin() + count, kept.end());
        kept.resize(count);
    }
    const MicroBatch* added = nullptr;
    if (!put(batches[index], kept, batch->modes, batch->packed) || !put(added, rest, batch->modes, batch->packed))
        return false;
    const int64_t place = random_.below(batches.size() + 1);
    batches.insert(batches.begin() + place, added);
    return true;
}

// Two into one: a padded micro-batch and the next of the order, or a packed one and any other.
bool Mutations::merge(std::vector<ReplicaState>& replicas, std::vector<size_t>& touched) {
    const size_t r = touched[0], index = any(replicas[r]);
    const MicroBatch* const batch = replicas[r].micro_batches[index];
    Place gone;
    if (batch->packed) {
        gone = another(replicas, {r, index});
        if (gone.replica == r && gone.index == index) return false;
    } else {
        const auto [other_r, other_i] = owner(replicas, batch->samples.back() + 1);
        if (other_r == kNowhere) return false;
        gone = {other_r, other_i};
    }
    auto& others = replicas[gone.replica].micro_batches;
    if (gone.replica != r && others.size() == 1) return false;
    const MicroBatch* const other = others[gone.index];
    std::vector<int32_t> samples = batch->samples;
    samples.insert(samples.end(), other->samples.begin(), other->samples.end());
    Modes modes = batch->modes;
    for (size_t v = 0; v < modes.size(); ++v) modes[v] = std::max(modes[v], other->modes[v]);
    if (!put(replicas[r].micro_batches[index], samples, modes, batch->packed)) return false;
    others.erase(others.begin() + gone.index);
    if (gone.replica != r) touched.push_back(gone.replica);
    return true;
}

// A virtual stage of the rank that works for the longest.
size_t Mutations::busiest_stage(const ReplicaState& replica) {
    const std::vector<int64_t> work = work_of_stages(problem_, replica.micro_batches);
    const size_t chunk = random_.below(problem_.chunks());
    return chunk * work.size() + (std::max_element(work.begin(), work.end()) - work.begin());
}

// Exchanges the modes of two micro-batches, on one virtual stage or from one on: memory stays about as full.
bool Mutations::exchange_modes(ReplicaState& replica) {
    auto& batches = replica.micro_batches;
    const size_t one = any(replica), other = any(replica), stages = problem_.modules.size();
    const size_t from = random_.below(2) ? busiest_stage(replica) : random_.below(stages);
    const size_t to = random_.below(2) ? from + 1 : stages;
    Modes mine = batches[one]->modes, theirs = batches[other]->modes;
    std::swap_ranges(mine.begin() + from, mine.begin() + to, theirs.begin() + from);
    return mine != batches[one]->modes && put(batches[one], batches[one]->samples, mine, batches[one]->packed) &&
           put(batches[other], batches[other]->samples, theirs, batches[other]->packed);
}

bool Mutations::recompute(ReplicaState& replica) {
    if (problem_.modes.size() < 2) return false;
    if (problem_.may_pack && random_.below(2)) return exchange_modes(replica);
    const MicroBatch*& slot = replica.micro_batches[any(replica)];
    Modes modes = slot->modes;
    const uint64_t mode = random_.below(problem_.modes.size()), stages = modes.size();
    const bool some = stages > 1 && random_.below(2);
    const size_t from = some ? random_.below(stages) : 0, to = some && random_.below(2) ? from + 1 : stages;
    std::fill(modes.begin() + from, modes.begin() + to, mode);
    return modes != slot->modes && put(slot, slot->samples, modes, slot->packed);
}

bool Mutations::change_layout(ReplicaState& replica) {
    const MicroBatch*& slot = replica.micro_batches[any(replica)];
    return put(slot, slot->samples, slot->modes, !slot->packed);
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
    if (may_divide_ && one_in(kDivisionChanges)) {
        replica.policy.least_gap = (replica.policy.least_gap + 1 + random_.below(kMostGaps - 1)) % kMostGaps;
        return true;
    }
    if (one_in(kRuleChanges)) {
        const int64_t rules = static_cast<int64_t>(Rule::kRules), rule = static_cast<int64_t>(replica.policy.rule);
        replica.policy.rule = static_cast<Rule>((rule + 1 + random_.below(rules - 1)) % rules);
        return true;
    }
    int64_t& depth = replica.policy.depth[random_.below(stages - 1)];
    depth += random_.below(2) ? 1 : -1;
    return depth >= 1;
}

}  // namespace dynapipe
