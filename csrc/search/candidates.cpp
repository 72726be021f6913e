#include "search/candidates.h"

#include <algorithm>

#include "checks.h"

namespace dynapipe {
namespace {

bool worse(const Edge& edge, const Edge& other) {
    if (edge.options & ~other.options || other.warmup > edge.warmup) return false;
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

// Refuses costs whose sums do not fit 64 bits.
void check_sums(const Problem& problem, const Graph& graph) {
    int64_t time = 1, warmup = 1;
    for (const Edge& edge : graph.edges) {
        time = std::max(time, edge.time);
        warmup = std::max(warmup, edge.warmup);
    }
    const int64_t samples = problem.samples(), chunks = problem.chunks();
    require(time <= kUnreachable / 4 / samples / chunks && warmup <= kUnreachable / 4 / problem.replicas,
            "a batch whose predicted times add up to less than 2^59 ns");
}

}  // namespace

Graph candidates(const Problem& problem, CostCache& costs, const Lengths& lengths, uint32_t mask) {
    Graph graph;
    const size_t samples = lengths.inputs.size(), modes = problem.modes.size();
    int64_t largest = 0;  // size of any grid
    for (const Grid& grid : problem.modes) largest = std::max(largest, grid.sizes.points.back());
    std::vector<CostCache::BySize*> by_size(modes);
    for (size_t start = 0; start < samples; ++start) {
        graph.first.push_back(graph.edges.size());
        int64_t input = -1, target = -1;
        const size_t last = std::min<size_t>(samples, start + largest);
        for (size_t end = start; end < last; ++end) {
            const int64_t size = end - start + 1;
            if (lengths.inputs[end] > input || lengths.targets[end] > target) {
                input = std::max(input, lengths.inputs[end]);
                target = std::max(target, lengths.targets[end]);
                for (size_t mode = 0; mode < modes; ++mode) by_size[mode] = &costs.by_size(mode, input, target);
            }
            const size_t before = graph.edges.size();
            for (size_t mode = 0; mode < modes; ++mode) {
                if (size > by_size[mode]->largest()) continue;
                const Summary& summary = costs.summary(*by_size[mode], size);
                const uint32_t options = summary.options & mask;
                if (!options) continue;
                graph.edges.push_back(
                    {summary.time, summary.warmup, static_cast<int32_t>(size), static_cast<uint32_t>(mode), options});
            }
            if (graph.edges.size() > before + 1) drop_worse(graph.edges, before);
        }
    }
    graph.first.push_back(graph.edges.size());
    check_sums(problem, graph);
    return graph;
}

}  // namespace dynapipe
