// Partitions an order of samples into micro-batches of least predicted iteration time (core/partition.py tells
// how).
#pragma once

#include <cstdint>
#include <vector>

#include "costs/costs.h"
#include "costs/problem.h"

namespace dynapipe {

// Padded lengths in some order of the samples.
struct Lengths {
    std::vector<int64_t> inputs, targets;
};

// Micro-batches as runs of an order.
struct Partition {
    std::vector<int64_t> sizes, modes;  // empty where no partition fits
    int64_t warmup = 0, total = 0;
    uint32_t options = ~uint32_t{0};  // under which all its micro-batches fit
};

// An order of samples, as places in the problem's, and its best partition for every option of micro-batches in flight.
struct OrderedPartitions {
    std::vector<int64_t> order;
    std::vector<Partition> partitions;
};

// Partitions the best of the given orders. With `improve` orders are improved first (improve_order.h), for the option
// of the most micro-batches in flight and then for that of the fewest: every order of a small batch, the best of a
// large one.
OrderedPartitions best_partitions(const Problem& problem, CostCache& costs,
                                  const std::vector<std::vector<int64_t>>& orders, bool improve);

}  // namespace dynapipe
