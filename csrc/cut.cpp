#include "cut.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "checks.h"

namespace dynapipe {
namespace {

// A micro-batch that may be cut: what it costs, and the options of micro-batches in flight under which it fits.
struct Candidate {
    int64_t time, fill;
    uint32_t options;
    bool known;
};

// Costs of micro-batches of one padded length under one recompute mode, by size, found when first asked for.
class Profile {
public:
    Profile(const CutProblem& problem, const Grid& grid, const std::vector<StageLayers>& kinds, int64_t input,
            int64_t target)
        : sizes_(&grid.sizes), by_size_(std::min<int64_t>(problem.inputs.size(), grid.sizes.points.back())) {
        const std::vector<int64_t> knots = grid.knots(input, target);
        for (const StageLayers& kind : kinds) append_stage_knots(knots, sizes_->points.size(), kind, rows_);
    }

    int64_t largest() const { return by_size_.size(); }

    const int64_t* rows() const { return rows_.data(); }

    Candidate& at(int64_t size) { return by_size_[size - 1]; }

    Axis::Cell cell(int64_t size) const { return sizes_->cell(size); }

    size_t knots() const { return sizes_->points.size(); }

private:
    const Axis* sizes_;
    std::vector<int64_t> rows_;  // [kinds][kStageRows][sizes]
    std::vector<Candidate> by_size_;
};

// Looks up what micro-batches cost.
class Costs {
public:
    explicit Costs(const CutProblem& problem) : problem_(problem), profiles_(problem.modes.size()) {
        for (const StageLayers& stage : problem.layers) {
            const auto found = std::find(kinds_.begin(), kinds_.end(), stage);
            kind_of_.push_back(found - kinds_.begin());
            if (found == kinds_.end()) kinds_.push_back(stage);
        }
        costs_of_kind_.resize(kinds_.size());
    }

    Profile& profile(size_t mode, int64_t input, int64_t target) {
        std::unique_ptr<Profile>& slot = profiles_[mode][input << 21 | target];
        if (!slot) slot = std::make_unique<Profile>(problem_, problem_.modes[mode], kinds_, input, target);
        return *slot;
    }

    const Candidate& candidate(Profile& profile, int64_t size) {
        Candidate& slot = profile.at(size);
        if (!slot.known) slot = compute(profile, size);
        return slot;
    }

private:
    struct KindCosts {
        int64_t time, stored, above;
    };

    Candidate compute(const Profile& profile, int64_t size) {
        const Axis::Cell cell = profile.cell(size);
        const size_t knots = profile.knots();
        for (size_t kind = 0; kind < kinds_.size(); ++kind) {
            const int64_t* rows = profile.rows() + kind * kStageRows * knots;
            int64_t at[kStageRows];
            for (int row = 0; row < kStageRows; ++row) {
                const int64_t* values = rows + row * knots;
                at[row] = interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
            }
            if (at[kForward] == kAbsent) return {0, 0, 0, true};
            const int64_t peak = std::max({at[kEncoderEnd], at[kDecoderEnd], at[kStored]});
            const int64_t time = at[kForward] + (problem_.forward_only ? 0 : at[kBackward]);
            costs_of_kind_[kind] = {time, at[kStored], peak - at[kStored]};
        }
        const size_t ranks = problem_.ranks(), options = problem_.options();
        int64_t slowest = 0, sum = 0;
        uint32_t fitting = (uint32_t{1} << options) - 1;
        for (size_t rank = 0; rank < ranks; ++rank) {
            KindCosts rank_costs{0, 0, 0};
            for (size_t stage = rank; stage < kind_of_.size(); stage += ranks) {
                const KindCosts& costs = costs_of_kind_[kind_of_[stage]];
                rank_costs.time += costs.time;
                rank_costs.stored += costs.stored;
                rank_costs.above = std::max(rank_costs.above, costs.above);
            }
            slowest = std::max(slowest, rank_costs.time);
            sum += rank_costs.time;
            for (size_t option = 0; option < options; ++option) {
                const int64_t held = problem_.forward_only ? 1 : problem_.in_flight[option * ranks + rank];
                if (rank_costs.stored * held + rank_costs.above > problem_.memory[rank])
                    fitting &= ~(uint32_t{1} << option);
            }
        }
        return {slowest, sum - slowest, fitting, true};
    }

    const CutProblem& problem_;
    std::vector<StageLayers> kinds_;  // distinct stages
    std::vector<size_t> kind_of_;     // [virtual stages]
    std::vector<KindCosts> costs_of_kind_;
    std::vector<std::unordered_map<int64_t, std::unique_ptr<Profile>>> profiles_;  // [modes]{lengths}
};

// One step of a path over the order: `size` samples run under `mode`.
struct Edge {
    int64_t time, fill;
    int32_t size, mode;
    uint32_t options;
};

// Edges from every sample, by size and then mode. Modes that cost more and fit no more are left out.
struct Graph {
    std::vector<Edge> edges;
    std::vector<size_t> first;  // [samples + 1]
};

bool worse(const Edge& edge, const Edge& other) {
    if (edge.options & ~other.options || other.fill > edge.fill) return false;
    return other.mode < edge.mode ? other.time <= edge.time : other.time < edge.time;
}

Graph build(const CutProblem& problem) {
    Graph graph;
    Costs costs(problem);
    const size_t samples = problem.inputs.size(), modes = problem.modes.size();
    std::vector<Profile*> profiles(modes);
    std::vector<Edge> same_size;
    for (size_t start = 0; start < samples; ++start) {
        graph.first.push_back(graph.edges.size());
        int64_t input = -1, target = -1;
        for (size_t end = start; end < samples; ++end) {
            const int64_t size = end - start + 1;
            if (problem.inputs[end] > input || problem.targets[end] > target) {
                input = std::max(input, problem.inputs[end]);
                target = std::max(target, problem.targets[end]);
                for (size_t mode = 0; mode < modes; ++mode) profiles[mode] = &costs.profile(mode, input, target);
            }
            same_size.clear();
            bool within = false;
            for (size_t mode = 0; mode < modes; ++mode) {
                if (size > profiles[mode]->largest()) continue;
                within = true;
                const Candidate& candidate = costs.candidate(*profiles[mode], size);
                if (!candidate.options) continue;
                same_size.push_back({candidate.time, candidate.fill, static_cast<int32_t>(size),
                                     static_cast<int32_t>(mode), candidate.options});
            }
            if (!within) break;
            for (const Edge& edge : same_size) {
                const bool useless = std::any_of(same_size.begin(), same_size.end(),
                                                 [&](const Edge& other) { return &other != &edge && worse(edge, other); });
                if (!useless) graph.edges.push_back(edge);
            }
        }
    }
    graph.first.push_back(graph.edges.size());
    return graph;
}

// Shortest paths over the edges that fit one option.
class Paths {
public:
    Paths(const Graph& graph, size_t option) : samples_(graph.first.size() - 1), rest_(samples_ + 1), choice_(samples_) {
        int64_t longest = 0;
        for (size_t i = 0; i < samples_; ++i) {
            first_.push_back(edges_.size());
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                if (!(graph.edges[e].options >> option & 1)) continue;
                edges_.push_back(graph.edges[e]);
                longest = std::max(longest, graph.edges[e].time);
            }
        }
        first_.push_back(edges_.size());
        require(longest <= (int64_t{1} << 60) / static_cast<int64_t>(samples_), "a total time below 2^60 ns");
    }

    // The path of least total time over edges whose fill is within the bound; no sizes where there is none.
    Cut shortest(int64_t bound) {
        rest_[samples_] = 0;
        for (size_t i = samples_; i-- > 0;) {
            int64_t least = kUnreachable;
            size_t chosen = 0;
            for (size_t e = first_[i]; e < first_[i + 1]; ++e) {
                const Edge& edge = edges_[e];
                const int64_t through = edge.time + rest_[i + edge.size];
                if (edge.fill <= bound && through < least) {
                    least = through;
                    chosen = e;
                }
            }
            rest_[i] = least;
            choice_[i] = chosen;
        }
        Cut cut;
        if (rest_[0] >= kUnreachable) return cut;
        cut.total = rest_[0];
        for (size_t i = 0; i < samples_; i += edges_[choice_[i]].size) {
            const Edge& edge = edges_[choice_[i]];
            cut.sizes.push_back(edge.size);
            cut.modes.push_back(edge.mode);
            cut.fill = std::max(cut.fill, edge.fill);
        }
        return cut;
    }

private:
    size_t samples_;
    std::vector<Edge> edges_;
    std::vector<size_t> first_;
    std::vector<int64_t> rest_;
    std::vector<size_t> choice_;
};

Cut best_cut(Paths& paths, int64_t replicas, int64_t chunks) {
    const auto objective = [&](const Cut& cut) { return cut.fill * replicas + cut.total * chunks; };
    Cut best;
    int64_t bound = kUnreachable;
    while (true) {
        Cut found = paths.shortest(bound);
        if (found.sizes.empty()) return best;
        if (best.sizes.empty() || objective(found) <= objective(best)) best = found;
        // A smaller fill F can win or tie only if F * replicas + G(bound) * chunks is at most the best objective.
        bound = std::min(found.fill - 1, (objective(best) - found.total * chunks) / replicas);
    }
}

}  // namespace

void CutProblem::check() const {
    require(!inputs.empty() && inputs.size() < (size_t{1} << 24), "between 1 and 2^24 samples");
    require(targets.size() == inputs.size(), "as many target lengths as input lengths");
    for (const auto* lengths : {&inputs, &targets})
        for (int64_t length : *lengths)
            require(length >= 0 && length <= kLargestCoordinate, "lengths from 0 to 2^20");
    require(!memory.empty() && memory.size() <= 4096, "between 1 and 4096 ranks");
    require(!layers.empty() && layers.size() % ranks() == 0 && chunks() <= 4096, "layers of whole chunks on every rank");
    require(!in_flight.empty() && in_flight.size() % ranks() == 0 && options() <= 31,
            "between 1 and 31 options of micro-batches in flight, for every rank");
    for (int64_t held : in_flight) require(held >= 1 && held <= 65536, "1 to 65536 micro-batches in flight");
    require(replicas >= 1 && replicas <= 65536, "1 to 65536 replicas");
    require(!modes.empty() && modes.size() <= 16, "between 1 and 16 recompute modes");
    for (const StageLayers& stage : layers)
        require(stage.encoder >= 0 && stage.decoder >= 0 && stage.encoder + stage.decoder <= 65536,
                "0 to 65536 layers on a stage");
}

std::vector<Cut> best_cuts(const CutProblem& problem) {
    const Graph graph = build(problem);
    std::vector<Cut> cuts;
    for (size_t option = 0; option < problem.options(); ++option) {
        Paths paths(graph, option);
        cuts.push_back(best_cut(paths, problem.replicas, problem.chunks()));
    }
    return cuts;
}

}  // namespace dynapipe
