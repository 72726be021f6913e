// What samples cost in packed rows: modules' costs as sums over the samples of a row.
//
// A row's cost is the sum of its samples' shares. From tables that were measured on padded micro-batches a share is
// derived: 1/b of a padded micro-batch of b samples of its own lengths, b = positions of the row / positions of the
// sample, counting inputs and targets together. Between two sizes of the grid the padded cost is linear in b, so the
// share is A / positions + B; where the next size was not measured or did not fit, it stays what it is at the last.
// Tables that were measured on packed rows give a part that is linear in the row's positions, and attention per sample.
// tests/helpers/packed_costs.py states the same rules.
#pragma once

#include <cstdint>
#include <vector>

#include "costs/problem.h"
#include "costs/tables.h"

namespace dynapipe {

// The samples of a packed row, as places in the problem, and its positions.
struct PackedRow {
    const std::vector<int32_t>& samples;
    int64_t inputs, targets, labels;
};

class PackedCosts {
public:
    explicit PackedCosts(const Problem& problem);

    // Modules' costs under a mode: [rows]. False where the cost model does not cover the row.
    bool module_costs(size_t mode, const PackedRow& row, std::vector<int64_t>& out);

    // Likewise, of the modules that run positions with labels alone; false where rows were not measured, or none as
    // long.
    bool labelled_costs(size_t mode, int64_t labels, std::vector<int64_t>& out) const;

    // The part of one sample in a row of so many positions, filled with samples like it: [rows].
    bool share(size_t mode, int32_t sample, int64_t positions, std::vector<int64_t>& out);

private:
    // Of one sample under one mode, by the size b of the padded micro-batch that its share is taken from.
    struct Shares {
        bool known = false, covered = false;
        std::vector<int64_t> from;   // [cells] positions of a row from which on a cell holds
        std::vector<int64_t> terms;  // [cells][A, B][stride]
    };

    const Shares& shares(size_t mode, size_t sample);
    bool add(size_t mode, size_t sample, int64_t positions);
    void sum(int64_t positions);
    void scatter(std::vector<int64_t>& out) const;
    int64_t with_labels(size_t i, size_t sample, int64_t value) const;
    bool add_linear(size_t mode, int64_t inputs, int64_t targets, int64_t labels, std::vector<int64_t>& out) const;
    void derive(const Grid& grid, size_t sample, Shares& shares) const;
    void measured(const PackedGrid& grid, size_t sample, Shares& shares) const;

    const Problem& problem_;
    std::vector<int32_t> lengths_;             // [samples] which of the different lengths each has
    std::vector<std::vector<Shares>> shares_;  // [modes][different lengths]
    const size_t width_, stride_;              // rows that are read, and so many filled up with zeros
    std::vector<int64_t> terms_, sums_;        // buffers: [A, B][stride], [rows that are read]
};

}  // namespace dynapipe
