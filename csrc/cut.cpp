#include "cut.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "checks.h"
#include "costs.h"
#include "refine.h"

namespace dynapipe {
namespace {

// One step of a path over the order: `size` samples run under `mode`.
struct Edge {
    int64_t time, fill;
    int32_t size;
    uint32_t mode : 5, options : 27;  // large batches have millions of edges: 24 bytes each
};

// Edges from every sample, by size and then mode. Modes that cost more and fit no more are left out.
struct Graph {
    std::vector<Edge> edges;
    std::vector<size_t> first;  // [samples + 1]

    size_t samples() const { return first.size() - 1; }
};

bool worse(const Edge& edge, const Edge& other) {
    if (edge.options & ~other.options || other.fill > edge.fill) return false;
    return other.mode < edge.mode ? other.time <= edge.time : other.time < edge.time;
}

// Of the edges from `first` on, which differ in their mode alone, drops those that another makes useless.
void drop_worse(std::vector<Edge>& edges, size_t first) {
    const std::vector<Edge> all(edges.begin() + first, edges.end());
    edges.resize(first);
    for (const Edge& edge : all)
        if (std::none_of(all.begin(), all.end(), [&](const Edge& other) { return worse(edge, other); }))
            edges.push_back(edge);
}

// Edges that fit one of the options of the mask.
Graph build(const CutProblem& problem, Costs& costs, uint32_t mask) {
    Graph graph;
    const size_t samples = problem.inputs.size(), modes = problem.modes.size();
    int64_t largest = 0;  // size of any grid
    for (const Grid& grid : problem.modes) largest = std::max(largest, grid.sizes.points.back());
    std::vector<Profile*> profiles(modes);
    for (size_t start = 0; start < samples; ++start) {
        graph.first.push_back(graph.edges.size());
        int64_t input = -1, target = -1;
        const size_t last = std::min<size_t>(samples, start + largest);
        for (size_t end = start; end < last; ++end) {
            const int64_t size = end - start + 1;
            if (problem.inputs[end] > input || problem.targets[end] > target) {
                input = std::max(input, problem.inputs[end]);
                target = std::max(target, problem.targets[end]);
                for (size_t mode = 0; mode < modes; ++mode) profiles[mode] = &costs.profile(mode, input, target);
            }
            const size_t before = graph.edges.size();
            for (size_t mode = 0; mode < modes; ++mode) {
                if (size > profiles[mode]->largest()) continue;
                const Candidate& candidate = costs.candidate(*profiles[mode], size);
                const uint32_t options = candidate.options & mask;
                if (!options) continue;
                graph.edges.push_back({candidate.time, candidate.fill, static_cast<int32_t>(size),
                                       static_cast<uint32_t>(mode), options});
            }
            if (graph.edges.size() > before + 1) drop_worse(graph.edges, before);
        }
    }
    graph.first.push_back(graph.edges.size());
    return graph;
}

// The edges of `graph` for which `keep(start, edge)` holds.
template <typename Keep>
Graph filtered(const Graph& graph, Keep keep) {
    Graph kept;
    kept.first.reserve(graph.first.size());
    for (size_t i = 0; i < graph.samples(); ++i) {
        kept.first.push_back(kept.edges.size());
        for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e)
            if (keep(i, graph.edges[e])) kept.edges.push_back(graph.edges[e]);
    }
    kept.first.push_back(kept.edges.size());
    return kept;
}

// Finds the path of least fill * replicas + total * chunks; of equal ones, that of the least fill.
//
// G(F), the least total over edges whose fill is at most F, never grows with F. So once G(F) is known, any bound
// F' <= F gives at least F' * replicas + G(F) * chunks: ranges of bounds that cannot beat the best known path are
// skipped, and within a range, edges that lie on no path that could.
class Search {
public:
    Search(const CutProblem& problem, size_t samples)
        : replicas_(problem.replicas), chunks_(problem.chunks()), rest_(samples + 1), before_(samples + 1),
          choice_(samples) {}

    Cut best(const Graph& graph) {
        best_ = Cut{};
        const int64_t least = least_fill(graph);
        if (least >= kUnreachable) return best_;
        const Cut free = shortest(graph, kUnreachable);
        offer(free);
        const int64_t step = (free.fill - least) / kProbes;
        offer(shortest(graph, least + 2 * step));
        const int64_t cheaper = (best_objective() - free.total * chunks_) / replicas_;
        const Graph near = filtered(graph, [&](size_t, const Edge& edge) { return edge.fill <= cheaper; });
        for (int64_t probe = 1; probe < kProbes; ++probe)  // A good path early makes the bounds tight.
            if (least + probe * step < cheaper) offer(shortest(near, least + probe * step));
        explore(near, least, cheaper);
        return best_;
    }

private:
    static constexpr int64_t kProbes = 8;

    int64_t objective(int64_t fill, int64_t total) const { return fill * replicas_ + total * chunks_; }

    int64_t best_objective() const { return objective(best_.fill, best_.total); }

    void offer(const Cut& cut) {
        if (cut.sizes.empty()) return;
        const int64_t ours = objective(cut.fill, cut.total), theirs = best_objective();
        if (best_.sizes.empty() || ours < theirs || (ours == theirs && cut.fill < best_.fill)) best_ = cut;
    }

    // Finds whatever path with a fill from `low` to `high` is better than the best known one.
    void explore(const Graph& graph, int64_t low, int64_t high) {
        const Cut top = shortest(graph, high);
        if (top.sizes.empty()) return;
        offer(top);
        const int64_t cheaper = (best_objective() - top.total * chunks_) / replicas_;
        const int64_t below = std::min(top.fill - 1, cheaper);
        if (low > below) return;
        reach(graph, high);
        const Graph near = filtered(graph, [&](size_t start, const Edge& edge) {
            const int64_t through = before_[start] + edge.time + rest_[start + edge.size];
            return edge.fill <= below && through < kUnreachable && objective(low, through) <= best_objective();
        });
        const int64_t middle = low + (below - low) / 2;
        explore(near, low, middle);
        if (middle < below) explore(near, middle + 1, below);
    }

    // The least bound on the fill under which there is a path.
    int64_t least_fill(const Graph& graph) {
        rest_.back() = 0;
        for (size_t i = graph.samples(); i-- > 0;) {
            rest_[i] = kUnreachable;
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                const Edge& edge = graph.edges[e];
                rest_[i] = std::min(rest_[i], std::max(edge.fill, rest_[i + edge.size]));
            }
        }
        return rest_[0];
    }

    // The path of least total time over edges whose fill is within the bound; no sizes where there is none.
    Cut shortest(const Graph& graph, int64_t bound) {
        rest_.back() = 0;
        for (size_t i = graph.samples(); i-- > 0;) {
            int64_t least = kUnreachable;
            size_t chosen = 0;
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                const Edge& edge = graph.edges[e];
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
        for (size_t i = 0; i < graph.samples(); i += graph.edges[choice_[i]].size) {
            const Edge& edge = graph.edges[choice_[i]];
            cut.sizes.push_back(edge.size);
            cut.modes.push_back(edge.mode);
            cut.options &= edge.options;
            cut.fill = std::max(cut.fill, edge.fill);
        }
        return cut;
    }

    // The least total from the first sample to every other, over the same edges.
    void reach(const Graph& graph, int64_t bound) {
        std::fill(before_.begin(), before_.end(), kUnreachable);
        before_[0] = 0;
        for (size_t i = 0; i < graph.samples(); ++i) {
            if (before_[i] >= kUnreachable) continue;
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                const Edge& edge = graph.edges[e];
                if (edge.fill > bound) continue;
                int64_t& there = before_[i + edge.size];
                there = std::min(there, before_[i] + edge.time);
            }
        }
    }

    const int64_t replicas_, chunks_;
    Cut best_;
    std::vector<int64_t> rest_, before_;  // [samples + 1]: least totals to the end, and from the start
    std::vector<size_t> choice_;
};

// Refuses costs whose sums do not fit 64 bits.
void check_sums(const CutProblem& problem, const Graph& graph) {
    int64_t time = 1, fill = 1;
    for (const Edge& edge : graph.edges) {
        time = std::max(time, edge.time);
        fill = std::max(fill, edge.fill);
    }
    const int64_t samples = problem.inputs.size(), chunks = problem.chunks();
    require(time <= kUnreachable / 4 / samples / chunks && fill <= kUnreachable / 4 / problem.replicas,
            "sums of costs below 2^59");
}

}  // namespace

bool CutProblem::allows(size_t option, size_t other) const {
    const auto held = in_flight.begin() + option * ranks(), more = in_flight.begin() + other * ranks();
    return std::equal(held, held + ranks(), more, std::less_equal<>());
}

void CutProblem::check() const {
    require(!inputs.empty() && inputs.size() < (size_t{1} << 24), "between 1 and 2^24 samples");
    require(targets.size() == inputs.size(), "as many target lengths as input lengths");
    for (const auto* lengths : {&inputs, &targets})
        for (int64_t length : *lengths)
            require(length >= 0 && length <= kLargestCoordinate, "lengths from 0 to 2^20");
    require(!memory.empty() && memory.size() <= 4096, "between 1 and 4096 ranks");
    require(!layers.empty() && layers.size() % ranks() == 0 && chunks() <= 64,
            "layers of whole chunks, 1 to 64, on every rank");
    require(!in_flight.empty() && in_flight.size() % ranks() == 0 && options() <= 26,
            "between 1 and 26 options of micro-batches in flight, for every rank");
    for (int64_t held : in_flight) require(held >= 1 && held <= 16384, "1 to 16384 micro-batches in flight");
    require(replicas >= 1 && replicas <= 65536, "1 to 65536 replicas");
    require(!modes.empty() && modes.size() <= 16, "between 1 and 16 recompute modes");
    for (const StageLayers& stage : layers)
        for (int64_t layers_of_kind : {stage.encoder, stage.decoder})  // each by itself: their sum could overflow
            require(layers_of_kind >= 0 && layers_of_kind <= 65536, "0 to 65536 layers of a kind on a stage");
}

namespace {

constexpr size_t kFewSamples = 2048;

std::vector<Cut> cuts_of(const CutProblem& problem, Costs& costs, uint32_t mask) {
    const Graph graph = build(problem, costs, mask);
    check_sums(problem, graph);
    Search search(problem, graph.samples());
    std::vector<Cut> cuts(problem.options());
    for (size_t option = cuts.size(); option-- > 0;) {
        if (!(mask >> option & 1)) continue;
        const auto easier = std::find_if(cuts.begin() + option + 1, cuts.end(), [&](const Cut& cut) {
            return !cut.sizes.empty() && cut.options >> option & 1 && problem.allows(&cut - cuts.data(), option);
        });
        if (easier != cuts.end()) {
            cuts[option] = *easier;  // The best of more candidates is the best of those among which it is.
            continue;
        }
        cuts[option] = search.best(
            filtered(graph, [&](size_t, const Edge& edge) { return edge.options >> option & 1; }));
    }
    return cuts;
}

Cut cut_of(const CutProblem& problem, Costs& costs, size_t option) {
    return cuts_of(problem, costs, uint32_t{1} << option)[option];
}

// Puts the problem's samples in another order, given as places in its present one.
void reorder(CutProblem& problem, std::vector<int64_t>& order, const std::vector<int64_t>& places) {
    const auto moved = [&](const std::vector<int64_t>& values) {
        std::vector<int64_t> out;
        for (int64_t place : places) out.push_back(values[place]);
        return out;
    };
    problem.inputs = moved(problem.inputs);
    problem.targets = moved(problem.targets);
    order = moved(order);
}

}  // namespace

OrderedCuts best_cuts(const CutProblem& original, const std::vector<std::vector<int64_t>>& orders, bool refine) {
    CutProblem problem;
    Costs costs(original);
    const size_t last = original.options() - 1;
    OrderedCuts best, present;
    const auto put = [&](const std::vector<int64_t>& order) {
        problem = original;
        present.order.resize(original.inputs.size());
        std::iota(present.order.begin(), present.order.end(), 0);
        reorder(problem, present.order, order);
    };
    const auto better = [&] {
        for (size_t option : last > 0 ? std::vector<size_t>{0, last} : std::vector<size_t>{0}) {
            const Cut cut = cut_of(problem, costs, option);
            if (!cut.sizes.empty()) reorder(problem, present.order, refined_order(problem, costs, option, cut));
        }
    };
    const auto objective = [&] {
        const Cut cut = cut_of(problem, costs, last);
        const int64_t chunks = problem.chunks();
        return cut.sizes.empty() ? kUnreachable : cut.fill * problem.replicas + cut.total * chunks;
    };
    const bool each = refine && original.inputs.size() <= kFewSamples;  // better every order, or only the best
    int64_t least = kUnreachable;
    for (const std::vector<int64_t>& order : orders) {
        put(order);
        if (each) better();
        const int64_t value = orders.size() > 1 ? objective() : 0;
        if (best.order.empty() || value < least) {
            least = value;
            best.order = present.order;
        }
    }
    put(best.order);
    if (refine && !each) better();
    present.cuts = cuts_of(problem, costs, ~uint32_t{0});
    return present;
}

}  // namespace dynapipe
