// Cutting an order of samples into micro-batches of least predicted iteration time (planning/partition.py, its twin).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tables.h"

namespace dynapipe {

struct CutProblem {
    std::vector<int64_t> inputs, targets;  // padded lengths in the order of the samples
    std::vector<Grid> modes;               // one layer's costs under each recompute mode
    std::vector<StageLayers> layers;       // of each virtual stage; virtual stage v is on rank v % ranks
    std::vector<int64_t> memory;           // [ranks] bytes for activations
    std::vector<int64_t> in_flight;        // [options][ranks] micro-batches a rank holds at once
    int64_t replicas;
    bool forward_only;

    size_t ranks() const { return memory.size(); }
    size_t options() const { return in_flight.size() / memory.size(); }
    size_t chunks() const { return layers.size() / memory.size(); }
    // Whether whatever fits with `other` in flight fits with `option`.
    bool allows(size_t option, size_t other) const;
    void check() const;
};

struct Cut {
    std::vector<int64_t> sizes, modes;  // empty where no cut fits
    int64_t fill = 0, total = 0;
    uint32_t options = ~uint32_t{0};  // under which all its micro-batches fit
};

// An order of samples, as places in the problem's, and its best cut for every option of micro-batches in flight.
struct OrderedCuts {
    std::vector<int64_t> order;
    std::vector<Cut> cuts;
};

// Cuts the best of the given orders. With `refine` orders are bettered first, for the option of the most micro-batches in
// flight and then for that of the fewest: every order of a small batch, the best of a large one.
OrderedCuts best_cuts(const CutProblem& problem, const std::vector<std::vector<int64_t>>& orders, bool refine);

}  // namespace dynapipe
