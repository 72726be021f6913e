// The micro-batches that a partition of an order may hold, as the edges of a graph over the samples.
#pragma once

#include <cstdint>
#include <vector>

#include "costs/costs.h"
#include "search/partition.h"

namespace dynapipe {

// One step of a path over the order: `size` samples run under `mode`.
struct Edge {
    int64_t time, warmup;
    int32_t size;
    uint32_t mode : 5, options : 27;  // large batches have millions of edges: 24 bytes each
};

// Edges from every sample, by size and then mode.
struct Graph {
    std::vector<Edge> edges;
    std::vector<size_t> first;  // [samples + 1]

    size_t samples() const { return first.size() - 1; }
};

// Edges that fit one of the options of the mask. Modes that cost more and fit no more are left out.
Graph candidates(const Problem& problem, CostCache& costs, const Lengths& lengths, uint32_t mask);

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

}  // namespace dynapipe
