// Costs of modules on a grid of micro-batch shapes, and the costs of a stage that follow from them.
// core/costs.py states the rules of interpolation, tests/helpers/stage_costs.py those of stages, with the same
// rounding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace dynapipe {

// What a module costs (core/costs.py): ns and bytes. The first five are also what a stage does.
enum Quantity { kForward, kBackward, kStored, kPeak, kWeight, kEntryStored, kEntryPeak, kQuantities };
constexpr int kStageQuantities = kEntryStored;

constexpr int64_t kMostModules = 131072;  // of a stage

constexpr int64_t kMostPercent = 1000;

// Percent of what its modules cost that a stage's passes take: forward, and the halves of its backward passes.
struct Correction {
    int64_t forward = 100, input = 100, weight = 100;

    bool operator==(const Correction&) const = default;
};

// Values that lie elsewhere, and what keeps them alive.
struct View {
    std::span<const int64_t> values;
    std::shared_ptr<const void> owner;
};

// Rows of a grid, one for each kind of module and quantity (kind * kQuantities + quantity), and those that are read:
// the others are 0 everywhere, or no stage needs them.
struct Rows {
    size_t kinds = 0;
    std::vector<int32_t> read;

    size_t count() const { return kinds * kQuantities; }
};

// A strictly increasing grid axis.
struct Axis {
    std::vector<int64_t> points;

    struct Cell {
        size_t low, high;
        int64_t part, width;
    };

    bool covers(int64_t x) const { return x <= points.back(); }
    Cell cell(int64_t x) const;  // of x clamped to the axis
};

// low + (high - low) * part / width, rounded to the nearest; absent where an end with weight is.
inline int64_t interpolate(int64_t low, int64_t high, int64_t part, int64_t width) {
    if (low < 0 || (part > 0 && high < 0)) return -1;
    if (part == 0) return low;
    const int64_t scaled = (high - low) * part + width / 2;
    if ((width & (width - 1)) == 0) return low + (scaled >> __builtin_ctzll(width));
    const int64_t quotient = scaled / width;
    return low + quotient - (scaled % width < 0);
}

struct Grid {
    Axis sizes, inputs, targets;
    View values;    // [rows][sizes][inputs][targets]
    View separate;  // the same, absent from each row by itself

    // Costs at every size of the grid for given lengths: [rows][sizes], absent outside, 0 in rows that are not read.
    std::vector<int64_t> at_lengths(const Rows& rows, int64_t input, int64_t target) const {
        return at(rows, values, input, target);
    }
    std::vector<int64_t> separately_at_lengths(const Rows& rows, int64_t input, int64_t target) const {
        return at(rows, separate, input, target);
    }

    void check(size_t rows) const;

private:
    size_t points() const { return sizes.points.size() * inputs.points.size() * targets.points.size(); }
    std::vector<int64_t> at(const Rows& rows, const View& from, int64_t input, int64_t target) const;
};

// Costs in packed rows, where they were measured: a part linear in the row's positions, and the attention of each
// sample.
struct PackedGrid {
    Axis row_inputs, row_targets;  // positions of a row
    View linear;                   // [rows][row_inputs][row_targets]
    Axis inputs, targets;          // positions of a sample
    View attention;                // [rows][inputs][targets]

    bool measured() const { return !inputs.points.empty(); }
    // Of the rows that are read, one after another. False where positions lie above the grid, or a value is absent.
    bool add_linear(const Rows& rows, int64_t row_inputs, int64_t row_targets, std::vector<int64_t>& out) const;
    bool attention_of(const Rows& rows, int64_t input, int64_t target, int64_t* out) const;
    void check(size_t rows) const;
};

// The modules of one virtual stage, by kind.
class StageModules {
public:
    StageModules(std::span<const int64_t> modules, size_t kinds);

    bool operator==(const StageModules& other) const {
        return modules_ == other.modules_ && correction_ == other.correction_;
    }
    void correct(const Correction& correction) { correction_ = correction; }
    bool holds(size_t kind) const { return counts_[kind] > 0; }
    bool begins_with(size_t kind) const { return !modules_.empty() && modules_[0] == static_cast<int64_t>(kind); }

    // Leaves out peaks that are 0 everywhere.
    void keep_peaks(const Rows& rows);
    size_t ends() const { return last_.size(); }

    // Costs at every size of the grid, from those of modules, [rows][sizes]: [kStageQuantities + ends][sizes], appended
    // to `out`. A size at which a cost is above kLargestCost is absent.
    //
    // Times and what is stored are sums, with what the stage keeps of its input. The peak is the highest of what is
    // stored, of that of its first module, and of the `ends`: its modules' peaks, each above what those before it
    // store.
    void append_costs(const std::vector<int64_t>& costs, size_t sizes, size_t ends, std::vector<int64_t>& out) const;

private:
    struct Last {
        size_t kind;
        std::vector<int64_t> before;  // [kinds] modules before the last one of the kind
    };

    bool costs_at(const std::vector<int64_t>& costs, size_t sizes, size_t k, int64_t* stage) const;

    std::vector<int64_t> modules_, counts_;
    std::vector<size_t> held_;  // kinds that are here
    std::vector<Last> last_;    // of each kind: earlier ones have less before them
    Correction correction_;
};

// A model's modules, divided between stages at the cuts.
std::vector<StageModules> divided_at(std::span<const int64_t> modules, std::span<const int64_t> cuts, size_t kinds);

}  // namespace dynapipe
