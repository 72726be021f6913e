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

// The sums over a row's samples that its costs under one mode are made of. They say what rows cost that hold about the
// same samples, without a look at the others.
struct RowSums {
    std::vector<int64_t> terms;   // [A, B][stride]; empty where they are not known
    std::vector<uint16_t> cells;  // [samples] which of its cells each is taken from
};

// How a row's samples follow from those of another one.
struct RowChange {
    std::vector<int32_t> from;  // [samples] the place of each in the other row, -1 where it comes from elsewhere
    struct Removed {
        int32_t place, sample;  // in the other row, and in the problem
    };
    std::vector<Removed> removed;  // what it lacks
};

class PackedCosts {
public:
    explicit PackedCosts(const Problem& problem);

    // Modules' costs under a mode: [rows]. False where the cost model does not cover the row. Fills `sums`.
    bool module_costs(size_t mode, const PackedRow& row, RowSums& sums, std::vector<int64_t>& out);

    // The same of a row that follows from another one, by that one's sums.
    bool changed_costs(size_t mode, const PackedRow& row, const RowChange& change, const RowSums& before, RowSums& sums,
                       std::vector<int64_t>& out);

    // Likewise, of the modules that run positions with labels alone; false where rows were not measured, or none as
    // long.
    bool labelled_costs(size_t mode, int64_t labels, std::vector<int64_t>& out) const;

    // The part of one sample in a row of so many positions, filled with samples like it: [rows].
    bool share(size_t mode, int32_t sample, int64_t positions, std::vector<int64_t>& out);

private:
    // Of one sample under one mode, by the size b of the padded micro-batch that its share is taken from.
    struct Shares {
        bool known = false, covered = false;
        std::vector<int64_t> terms;  // [cells][A, B][stride]
    };

    const Shares& shares(size_t mode, size_t sample);
    size_t cell_of(size_t mode, int32_t sample, int64_t positions, size_t from = 0) const;
    bool add(size_t mode, int32_t sample, size_t cell, RowSums& sums);
    void subtract(size_t mode, int32_t sample, size_t cell, RowSums& sums);
    void add_extras(size_t mode, int32_t sample, int64_t times, RowSums& sums) const;
    bool finish(size_t mode, const PackedRow& row, const RowSums& sums, std::vector<int64_t>& out);
    void sum(int64_t positions, const std::vector<int64_t>& terms);
    void scatter(std::vector<int64_t>& out) const;
    int64_t with_labels(size_t i, size_t sample, int64_t value) const;
    bool add_linear(size_t mode, int64_t inputs, int64_t targets, int64_t labels, std::vector<int64_t>& out) const;
    void derive(const Grid& grid, size_t sample, Shares& shares) const;
    void measured(const PackedGrid& grid, size_t sample, Shares& shares) const;

    const Problem& problem_;
    std::vector<int32_t> lengths_;             // [samples] which of the different lengths each has
    std::vector<int32_t> own_;                 // [samples] positions
    std::vector<std::vector<Shares>> shares_;  // [modes][different lengths]
    const size_t width_, stride_;              // rows that are read, and so many filled up with zeros
    RowSums of_sample_;                        // buffers
    std::vector<int64_t> sums_;                // [rows that are read]
};

}  // namespace dynapipe
