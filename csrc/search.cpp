#include "search.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "checks.h"

namespace dynapipe {
namespace {

// SplitMix64: the same numbers on every machine.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }

    int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }

private:
    uint64_t state_;
};

// Costs of micro-batches by shape and mode, found when first asked for.
class ShapeCosts {
public:
    explicit ShapeCosts(const SearchProblem& problem) : problem_(problem), knots_(problem.modes.size()) {}

    // Null where the micro-batch lies outside the cost model or does not fit beside the model state.
    const PassCosts* at(const MicroBatch& batch) {
        int64_t input = 0, target = 0;
        for (int64_t i = batch.first; i < batch.first + batch.size; ++i) {
            input = std::max(input, problem_.inputs[i]);
            target = std::max(target, problem_.targets[i]);
        }
        const uint64_t lengths = static_cast<uint64_t>(input) << 21 | static_cast<uint64_t>(target);
        std::unordered_map<int64_t, Entry>& sizes = entries_[lengths * problem_.modes.size() + batch.mode];
        const auto found = sizes.find(batch.size);
        if (found != sizes.end()) return found->second.usable ? &found->second.costs : nullptr;
        Entry& entry = sizes[batch.size];
        compute(batch, input, target, entry);
        return entry.usable ? &entry.costs : nullptr;
    }

private:
    struct Entry {
        std::vector<int64_t> values;
        PassCosts costs;
        bool usable = false;
    };

    void compute(const MicroBatch& batch, int64_t input, int64_t target, Entry& entry) {
        const Grid& grid = problem_.modes[batch.mode];
        const int64_t stages = problem_.layers.size(), points = grid.sizes.points.size();
        if (!grid.sizes.covers(batch.size)) return;
        std::vector<int64_t>& rows = knots_[batch.mode][static_cast<uint64_t>(input) << 21 | static_cast<uint64_t>(target)];
        if (rows.empty()) {
            const std::vector<int64_t> knots = grid.knots(input, target);
            for (const StageLayers& stage : problem_.layers) append_stage_knots(knots, points, stage, rows);
        }
        const Axis::Cell cell = grid.sizes.cell(batch.size);
        entry.values.assign(6 * stages, 0);
        int64_t* const out = entry.values.data();
        for (int64_t v = 0; v < stages; ++v) {
            int64_t at[kStageRows];
            for (int row = 0; row < kStageRows; ++row) {
                const int64_t* values = rows.data() + (v * kStageRows + row) * points;
                at[row] = interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
            }
            if (at[kForward] == kAbsent) return;
            out[v] = at[kForward];
            out[stages + v] = at[kBackward];
            out[2 * stages + v] = at[kStored];
            out[3 * stages + v] = std::max({at[kEncoderEnd], at[kDecoderEnd], at[kStored]});
            if (problem_.shape.model_state[v % problem_.shape.stages] + out[3 * stages + v] > problem_.shape.memory_limit)
                return;
        }
        for (int64_t v = 0; v + 1 < stages; ++v) {
            const Links& links = problem_.links;
            const int64_t input_bytes = batch.size * input * links.bytes_per_position;
            const int64_t target_bytes = batch.size * target * links.bytes_per_position;
            out[4 * stages + v] = transfer(v, input_bytes + (links.decoder_forward[v] ? target_bytes : 0));
            out[5 * stages + v + 1] = transfer(v, input_bytes + (links.decoder_backward[v] ? target_bytes : 0));
        }
        entry.costs = {out, out + stages, out + 2 * stages, out + 3 * stages, out + 4 * stages, out + 5 * stages};
        entry.usable = true;
    }

    int64_t transfer(int64_t boundary, int64_t bytes) const {
        const double wire = static_cast<double>(bytes * 8) / problem_.links.gbps[boundary];
        return static_cast<int64_t>(std::nearbyint(problem_.links.latency_ns[boundary] + wire));
    }

    const SearchProblem& problem_;
    std::vector<std::unordered_map<uint64_t, std::vector<int64_t>>> knots_;
    std::unordered_map<uint64_t, std::unordered_map<int64_t, Entry>> entries_;
};

// All replicas of a solution and what they come to.
struct Solution {
    std::vector<ReplicaState> replicas;

    int64_t slowest() const {
        int64_t most = 0;
        for (const ReplicaState& replica : replicas) most = std::max(most, replica.makespan);
        return most;
    }
    // The slowest replica's makespan first; a faster other replica is room for later moves.
    int64_t objective() const {
        int64_t sum = 0;
        for (const ReplicaState& replica : replicas) sum += replica.makespan;
        return slowest() + sum / static_cast<int64_t>(16 * replicas.size());
    }
};

class Search {
public:
    Search(const SearchProblem& problem, int64_t evaluations, uint64_t seed)
        : problem_(problem), costs_(problem), scheduler_(problem.shape), random_(seed), left_(evaluations) {}

    Found run(const std::vector<std::vector<MicroBatch>>& cuts);

private:
    int64_t evaluate(ReplicaState& replica, int64_t bound, std::vector<uint8_t>* forwards = nullptr);
    bool look_up(MicroBatch& batch);
    int64_t work(MicroBatch& batch);
    Solution begin(std::vector<MicroBatch> batches);
    void begin_replica(ReplicaState& replica);
    void improve(Solution& solution, int64_t evaluations);
    bool move(Solution& solution, std::vector<size_t>& touched);
    Policy policy(int64_t extra, Rule rule) const;
    bool reorder(ReplicaState& replica);
    bool shift(Solution& solution, std::vector<size_t>& touched);
    bool split(ReplicaState& replica);
    bool merge(Solution& solution, std::vector<size_t>& touched);
    bool recompute(ReplicaState& replica);
    bool hand_over(Solution& solution, std::vector<size_t>& touched);
    bool deepen(ReplicaState& replica);
    std::pair<size_t, size_t> owner(const Solution& solution, int64_t first) const;

    const SearchProblem& problem_;
    ShapeCosts costs_;
    ListScheduler scheduler_;
    Random random_;
    int64_t left_;
    std::vector<const PassCosts*> rows_;
};

bool Search::look_up(MicroBatch& batch) {
    if (!batch.costs) batch.costs = costs_.at(batch);
    return batch.costs;
}

int64_t Search::evaluate(ReplicaState& replica, int64_t bound, std::vector<uint8_t>* forwards) {
    rows_.clear();
    --left_;
    for (MicroBatch& batch : replica.micro_batches) {
        if (!look_up(batch)) return kUnreachable;
        rows_.push_back(batch.costs);
    }
    return scheduler_.run(rows_, replica.policy, bound, forwards);
}

Policy Search::policy(int64_t extra, Rule rule) const {
    Policy policy{{}, rule};
    for (int64_t s = 0; s < problem_.shape.stages; ++s)
        policy.depth.push_back(s + 1 < problem_.shape.stages ? problem_.shape.stages - s + extra : 1);
    return policy;
}

// Time on all stages together.
int64_t Search::work(MicroBatch& batch) {
    int64_t sum = 0;
    for (size_t v = 0; v < problem_.layers.size(); ++v) sum += batch.costs->forward[v] + batch.costs->backward[v];
    return sum;
}

// Orders to begin with: small to large, large to small, small – large – small, and as cut, under a few policies, of
// which one is plain 1F1B; the best is kept. The micro-batches come small to large.
void Search::begin_replica(ReplicaState& replica) {
    std::vector<std::vector<MicroBatch>> orders(4);
    orders[0] = replica.micro_batches;
    orders[1].assign(orders[0].rbegin(), orders[0].rend());
    for (size_t i = 0; i < orders[0].size(); i += 2) orders[2].push_back(orders[0][i]);
    for (size_t i = orders[0].size() / 2 * 2; i > 0; i -= 2) orders[2].push_back(orders[0][i - 1]);
    orders[3] = orders[0];
    std::sort(orders[3].begin(), orders[3].end(),
              [](const MicroBatch& a, const MicroBatch& b) { return a.first < b.first; });
    ReplicaState best = replica;
    best.makespan = kUnreachable;
    for (const std::vector<MicroBatch>& order : orders) {
        for (int64_t extra : {0, 1, 3, 8}) {
            for (Rule rule : {Rule::kBackwardFirst, Rule::kForwardFirst, Rule::kStrict}) {
                ReplicaState candidate{order, policy(extra, rule), 0};
                candidate.makespan = evaluate(candidate, best.makespan);
                if (candidate.makespan < best.makespan) best = std::move(candidate);
            }
        }
    }
    replica = std::move(best);
}

// Deals a cut to the replicas, the longest micro-batch first, each to the replica with the least work.
Solution Search::begin(std::vector<MicroBatch> batches) {
    Solution solution;
    solution.replicas.resize(problem_.replicas);
    std::vector<std::pair<int64_t, size_t>> by_work;
    for (size_t i = 0; i < batches.size(); ++i) {
        if (!look_up(batches[i])) {
            solution.replicas[0].makespan = kUnreachable;
            return solution;
        }
        by_work.emplace_back(work(batches[i]), i);
    }
    std::sort(by_work.begin(), by_work.end());
    std::vector<int64_t> load(problem_.replicas, 0);
    for (size_t i = by_work.size(); i-- > 0;) {
        const size_t r = std::min_element(load.begin(), load.end()) - load.begin();
        load[r] += by_work[i].first;
        solution.replicas[r].micro_batches.push_back(batches[by_work[i].second]);
    }
    for (ReplicaState& replica : solution.replicas) {
        std::reverse(replica.micro_batches.begin(), replica.micro_batches.end());
        replica.policy = policy(0, Rule::kStrict);
        if (!replica.micro_batches.empty()) begin_replica(replica);
    }
    return solution;
}

Found Search::run(const std::vector<std::vector<MicroBatch>>& cuts) {
    std::vector<Solution> solutions;
    for (const std::vector<MicroBatch>& cut : cuts) {
        Solution solution = begin(cut);
        if (solution.slowest() < kUnreachable) solutions.push_back(std::move(solution));
    }
    std::stable_sort(solutions.begin(), solutions.end(),
                     [](const Solution& a, const Solution& b) { return a.objective() < b.objective(); });
    Found found;
    if (solutions.empty()) return found;
    // A third of what is left for the two best starts each, the rest for the better of them.
    const size_t contenders = std::min<size_t>(2, solutions.size());
    const int64_t share = left_ / 3;
    for (size_t i = 0; i < contenders && share > 0; ++i) improve(solutions[i], share);
    Solution& best = contenders > 1 && solutions[1].objective() < solutions[0].objective() ? solutions[1] : solutions[0];
    if (left_ > 0) improve(best, left_);
    for (ReplicaState& replica : best.replicas) {
        found.forwards.emplace_back();
        if (!replica.micro_batches.empty()) evaluate(replica, kUnreachable, &found.forwards.back());
    }
    found.replicas = std::move(best.replicas);
    return found;
}

// Threshold accepting: a worse solution is taken while it is within a margin of the best that shrinks to nothing.
void Search::improve(Solution& best, int64_t evaluations) {
    const int64_t until = left_ - evaluations, first = left_;
    Solution current = best;
    int64_t current_objective = current.objective(), best_objective = current_objective;
    const int64_t margin = best_objective / 2000;
    std::vector<size_t> touched;
    for (int64_t idle = 0; left_ > until && idle < 1000; ++idle) {
        touched.clear();
        Solution candidate = current;
        if (!move(candidate, touched)) continue;
        const int64_t before = left_;
        const int64_t allowed = best_objective + margin * (left_ - until) / (first - until);
        const int64_t limit = std::max(current_objective, allowed);
        bool fits = true;
        for (size_t r : touched) {
            ReplicaState& replica = candidate.replicas[r];
            replica.makespan = replica.micro_batches.empty() ? 0 : evaluate(replica, limit + 1);
            fits = fits && replica.makespan < kUnreachable;
            if (!fits) break;
        }
        if (left_ < before) idle = 0;
        if (!fits || candidate.objective() > limit) continue;
        current = std::move(candidate);
        current_objective = current.objective();
        if (current_objective < best_objective) {
            best = current;
            best_objective = current_objective;
        }
    }
}

// One random change; false where the one drawn does not apply.
bool Search::move(Solution& solution, std::vector<size_t>& touched) {
    // Half of the time at the slowest replica, which alone decides the iteration's time.
    size_t r = random_.below(solution.replicas.size());
    if (random_.below(2)) {
        r = 0;
        for (size_t other = 1; other < solution.replicas.size(); ++other)
            if (solution.replicas[other].makespan > solution.replicas[r].makespan) r = other;
    }
    ReplicaState& replica = solution.replicas[r];
    if (replica.micro_batches.empty()) return false;
    touched.push_back(r);
    switch (random_.below(solution.replicas.size() > 1 ? 10 : 8)) {
        case 0:
        case 1:
        case 2: return reorder(replica);
        case 3: return shift(solution, touched);
        case 4: return split(replica);
        case 5: return merge(solution, touched);
        case 6: return recompute(replica);
        case 7: return deepen(replica);
        default: return hand_over(solution, touched);
    }
}

bool Search::reorder(ReplicaState& replica) {
    const int64_t count = replica.micro_batches.size();
    if (count < 2) return false;
    const int64_t from = random_.below(count);
    int64_t to = random_.below(count);
    if (random_.below(2)) to = from + 1 + random_.below(3) * (random_.below(2) ? 1 : -1);
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

std::pair<size_t, size_t> Search::owner(const Solution& solution, int64_t first) const {
    for (size_t r = 0; r < solution.replicas.size(); ++r)
        for (size_t i = 0; i < solution.replicas[r].micro_batches.size(); ++i)
            if (solution.replicas[r].micro_batches[i].first == first) return {r, i};
    return {0, 0};
}

// Moves the border between a micro-batch and the next of the cut.
bool Search::shift(Solution& solution, std::vector<size_t>& touched) {
    const size_t r = touched[0];
    MicroBatch& batch = solution.replicas[r].micro_batches[random_.below(solution.replicas[r].micro_batches.size())];
    const int64_t border = batch.first + batch.size;
    if (border == static_cast<int64_t>(problem_.inputs.size())) return false;
    const auto [other_r, other_i] = owner(solution, border);
    MicroBatch& other = solution.replicas[other_r].micro_batches[other_i];
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

bool Search::split(ReplicaState& replica) {
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

bool Search::merge(Solution& solution, std::vector<size_t>& touched) {
    const size_t r = touched[0];
    const size_t i = random_.below(solution.replicas[r].micro_batches.size());
    const MicroBatch batch = solution.replicas[r].micro_batches[i];
    const int64_t border = batch.first + batch.size;
    if (border == static_cast<int64_t>(problem_.inputs.size())) return false;
    const auto [other_r, other_i] = owner(solution, border);
    auto& others = solution.replicas[other_r].micro_batches;
    if (other_r != r && others.size() == 1) return false;
    MicroBatch& merged = solution.replicas[r].micro_batches[i];
    merged.size += others[other_i].size;
    merged.mode = std::max(merged.mode, others[other_i].mode);
    merged.costs = nullptr;
    others.erase(others.begin() + other_i);
    if (other_r != r) touched.push_back(other_r);
    return true;
}

bool Search::recompute(ReplicaState& replica) {
    const int64_t modes = problem_.modes.size();
    if (modes < 2) return false;
    MicroBatch& batch = replica.micro_batches[random_.below(replica.micro_batches.size())];
    batch.mode = (batch.mode + 1 + random_.below(modes - 1)) % modes;
    batch.costs = nullptr;
    return true;
}

// Gives a micro-batch to another replica, or exchanges two.
bool Search::hand_over(Solution& solution, std::vector<size_t>& touched) {
    const size_t r = touched[0];
    const size_t other_r = (r + 1 + random_.below(solution.replicas.size() - 1)) % solution.replicas.size();
    auto& mine = solution.replicas[r].micro_batches;
    auto& theirs = solution.replicas[other_r].micro_batches;
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

bool Search::deepen(ReplicaState& replica) {
    const int64_t stages = problem_.shape.stages;
    if (stages < 2 || problem_.shape.forward_only) return false;
    if (random_.below(4) == 0) {
        const int64_t rules = static_cast<int64_t>(Rule::kRules), rule = static_cast<int64_t>(replica.policy.rule);
        replica.policy.rule = static_cast<Rule>((rule + 1 + random_.below(rules - 1)) % rules);
        return true;
    }
    int64_t& depth = replica.policy.depth[random_.below(stages - 1)];
    depth += random_.below(2) ? 1 : -1;
    return depth >= 1;
}

}  // namespace

void SearchProblem::check() const {
    const size_t stages = layers.size();
    require(!inputs.empty() && inputs.size() < (size_t{1} << 24), "between 1 and 2^24 samples");
    require(targets.size() == inputs.size(), "as many target lengths as input lengths");
    for (const auto* lengths : {&inputs, &targets})
        for (int64_t length : *lengths)
            require(length >= 0 && length <= kLargestCoordinate, "lengths from 0 to 2^20");
    require(stages >= 1 && stages <= 4096 && shape.chunks == 1, "1 to 4096 stages of one chunk");
    require(shape.model_state.size() == stages, "model state for every stage");
    for (const auto* flags : {&links.decoder_forward, &links.decoder_backward})
        require(flags->size() == stages - 1, "links between neighbouring stages");
    for (const auto* rates : {&links.latency_ns, &links.gbps})
        require(rates->size() == stages - 1, "links between neighbouring stages");
    for (double gbps : links.gbps) require(gbps > 0, "a rate above 0 on every link");
    for (double latency : links.latency_ns) require(latency >= 0 && latency < 1e15, "latencies from 0 to 1e15 ns");
    require(links.bytes_per_position >= 0 && links.bytes_per_position <= kLargestCoordinate * 8, "bytes per position");
    require(replicas >= 1 && replicas <= 65536, "1 to 65536 replicas");
    require(!modes.empty() && modes.size() <= 16, "between 1 and 16 recompute modes");
}

Found search(const SearchProblem& problem, const std::vector<std::vector<MicroBatch>>& cuts, int64_t evaluations,
             uint64_t seed) {
    return Search(problem, evaluations, seed).run(cuts);
}

}  // namespace dynapipe
