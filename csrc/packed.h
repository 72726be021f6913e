// What samples cost in packed rows: one layer's costs as sums over the samples of a row.
//
// A row's cost is the sum of its samples' shares. From tables that were measured on padded micro-batches a share is
// derived: 1/b of a padded micro-batch of b samples of its own lengths, b = positions of the row / positions of the
// sample, counting inputs and targets together. Between two sizes of the grid the padded cost is linear in b, so the
// share is A / positions + B; where the next size was not measured or did not fit, it stays what it is at the last.
// Tables that were measured on packed rows give a part that is linear in the row's positions, and attention per sample.
// cost/packed.py states the same rules. The costs of a row with pieces are divided into parts as a whole, with what its
// prefixes add (cost/division.py).
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"
#include "tables.h"

namespace dynapipe {

// The samples of a packed row, as places in the problem, and its positions.
struct PackedRow {
    const std::vector<int32_t>& samples;
    int64_t inputs, targets;
};

class PackedCosts {
public:
    explicit PackedCosts(const Problem& problem);

    // One layer's costs under a mode: [kRows]. False where the cost model does not cover the row.
    bool layer_costs(size_t mode, const PackedRow& row, int64_t (&out)[kRows]);

    // The part of one sample in a row of so many positions, filled with samples like it: [kRows].
    bool share(size_t mode, int32_t sample, int64_t positions, int64_t (&out)[kRows]);

private:
    // Of one sample under one mode, by the size b of the padded micro-batch that its share is taken from.
    struct Shares {
        bool known = false, covered = false;
        std::vector<int64_t> from;  // [cells] positions of a row from which on a cell holds
        std::vector<int64_t> terms;  // [cells][A of kRows, B of kRows]
    };

    const Shares& shares(size_t mode, size_t sample);
    void divide_parts(size_t mode, const std::vector<int32_t>& samples, int64_t (&out)[kRows]) const;
    bool add(size_t mode, size_t sample, int64_t positions, int64_t (&terms)[2 * kRows]);
    void derive(const Grid& grid, size_t sample, Shares& shares) const;
    void measured(const PackedGrid& grid, size_t sample, Shares& shares) const;

    const Problem& problem_;
    std::vector<int32_t> lengths_;             // [samples] which of the different lengths each has
    std::vector<std::vector<Shares>> shares_;  // [modes][different lengths]
    std::vector<int64_t> before_;              // [samples] positions of the pieces before it, where samples are cut
};

}  // namespace dynapipe
