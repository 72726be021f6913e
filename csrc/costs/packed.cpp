#include "costs/packed.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>

#include "checks.h"

namespace dynapipe {
namespace {

// Above this a share could overflow the sums over a row of 2^21 positions.
constexpr int64_t kLargestShare = int64_t{1} << 40;
constexpr int64_t kLargestRow = kLargestCoordinate;  // inputs, and targets
constexpr size_t kLanes = 4;                         // terms that are added side by side

int64_t divide(__int128 value, __int128 by) {  // rounded to the nearest, halves up
    const __int128 twice = 2 * value + by;
    if (const int64_t small = twice, whole = 2 * by; small == twice && whole == 2 * by)
        return small / whole - (small % whole < 0);
    const __int128 quotient = twice / (2 * by);
    return static_cast<int64_t>(quotient - (twice % (2 * by) < 0));
}

}  // namespace

PackedCosts::PackedCosts(const Problem& problem)
    : problem_(problem),
      width_(problem.rows.read.size()),
      stride_((width_ + kLanes - 1) / kLanes * kLanes),
      sums_(width_) {
    std::map<std::tuple<int64_t, int64_t, int64_t>, int32_t> different;
    for (size_t i = 0; i < problem.samples(); ++i) {
        const std::tuple its{problem.input_positions[i], problem.target_positions[i],
                             problem.counts_labels() ? problem.labels[i] : 0};
        lengths_.push_back(different.try_emplace(its, different.size()).first->second);
        own_.push_back(std::max<int64_t>(problem.input_positions[i] + problem.target_positions[i], 1));
    }
    shares_.assign(problem.modes.size(), std::vector<Shares>(different.size()));
}

bool PackedCosts::module_costs(size_t mode, const PackedRow& row, RowSums& sums, std::vector<int64_t>& out) {
    sums.terms.assign(2 * stride_, 0);
    sums.cells.clear();
    for (int32_t sample : row.samples) {
        const size_t cell = cell_of(mode, sample, row.inputs + row.targets);
        if (!add(mode, sample, cell, sums)) return false;
        sums.cells.push_back(cell);
    }
    return finish(mode, row, sums, out);
}

bool PackedCosts::changed_costs(size_t mode, const PackedRow& row, const RowChange& change, const RowSums& before,
                                RowSums& sums, std::vector<int64_t>& out) {
    const bool cells_stay = problem_.packed[mode].measured();
    sums.terms = before.terms;
    sums.cells.resize(row.samples.size());
    for (const RowChange::Removed& removed : change.removed)
        subtract(mode, removed.sample, before.cells[removed.place], sums);
    for (size_t i = 0; i < row.samples.size(); ++i) {
        const int32_t sample = row.samples[i], from = change.from[i];
        const size_t was = from < 0 ? 0 : before.cells[from];
        sums.cells[i] = was;
        if (from >= 0 && cells_stay) continue;
        const size_t cell = cell_of(mode, sample, row.inputs + row.targets, was);
        if (from >= 0 && cell == was) continue;
        sums.cells[i] = cell;
        if (from >= 0) subtract(mode, sample, was, sums);
        if (!add(mode, sample, cell, sums)) return false;
    }
    return finish(mode, row, sums, out);
}

// Costs of a row from its sums; false where they are not known of so many positions, and then nor are the sums.
bool PackedCosts::finish(size_t mode, const PackedRow& row, const RowSums& sums, std::vector<int64_t>& out) {
    if (row.inputs > kLargestRow || row.targets > kLargestRow) return false;
    sum(row.inputs + row.targets, sums.terms);
    if (problem_.packed[mode].measured() && !add_linear(mode, row.inputs, row.targets, row.labels, sums_)) return false;
    scatter(out);
    return true;
}

bool PackedCosts::share(size_t mode, int32_t sample, int64_t positions, std::vector<int64_t>& out) {
    const int64_t input = problem_.input_positions[sample], target = problem_.target_positions[sample];
    const int64_t own = own_[sample], scale = std::max(positions, own);
    of_sample_.terms.assign(2 * stride_, 0);
    if (!add(mode, sample, cell_of(mode, sample, scale), of_sample_)) return false;
    sum(scale, of_sample_.terms);
    if (problem_.packed[mode].measured()) {
        std::vector<int64_t> linear(width_, 0);
        const int64_t labels = problem_.counts_labels() ? problem_.labels[sample] * scale / own : 0;
        if (!add_linear(mode, input * scale / own, target * scale / own, labels, linear)) return false;
        for (size_t row = 0; row < width_; ++row) sums_[row] += divide(static_cast<__int128>(linear[row]) * own, scale);
    }
    scatter(out);
    return true;
}

// The cell of a sample in a row of so many positions: the last that begins there or before. The search begins at
// `cell`.
size_t PackedCosts::cell_of(size_t mode, int32_t sample, int64_t positions, size_t cell) const {
    if (problem_.packed[mode].measured()) return 0;
    const std::vector<int64_t>& sizes = problem_.modes[mode].sizes.points;  // cell i + 1 begins at size i
    const int64_t own = own_[sample];
    while (cell < sizes.size() && own * sizes[cell] <= positions) ++cell;
    while (cell > 0 && own * sizes[cell - 1] > positions) --cell;
    return cell;
}

// Adds a sample's terms; false where the cost model does not cover it.
bool PackedCosts::add(size_t mode, int32_t sample, size_t cell, RowSums& sums) {
    const Shares& its = shares(mode, sample);
    if (!its.covered) return false;
    const int64_t* values = its.terms.data() + cell * 2 * stride_;
    int64_t* terms = sums.terms.data();
    for (size_t term = 0; term < 2 * stride_; term += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) terms[term + lane] += values[term + lane];
    if (problem_.has_extras(sample)) add_extras(mode, sample, 1, sums);
    return true;
}

// Takes back the terms of a sample that was added.
void PackedCosts::subtract(size_t mode, int32_t sample, size_t cell, RowSums& sums) {
    const int64_t* values = shares(mode, sample).terms.data() + cell * 2 * stride_;
    int64_t* terms = sums.terms.data();
    for (size_t term = 0; term < 2 * stride_; term += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) terms[term + lane] -= values[term + lane];
    if (problem_.has_extras(sample)) add_extras(mode, sample, -1, sums);
}

// What a piece of a sample, or a share, costs besides.
void PackedCosts::add_extras(size_t mode, int32_t sample, int64_t times, RowSums& sums) const {
    const int64_t* extra = problem_.extras.data() + (mode * problem_.samples() + sample) * problem_.rows.count();
    for (size_t i = 0; i < width_; ++i)
        sums.terms[stride_ + i] += times * with_labels(i, sample, extra[problem_.rows.read[i]]);
}

// A sample's share of a row that is read, by how many of its positions count.
int64_t PackedCosts::with_labels(size_t i, size_t sample, int64_t value) const {
    if (!problem_.counts_labels() || !problem_.scaled_by_labels[i]) return value;
    return divide(static_cast<__int128>(value) * problem_.labels[sample],
                  std::max<int64_t>(problem_.input_positions[sample], 1));
}

bool PackedCosts::add_linear(size_t mode, int64_t inputs, int64_t targets, int64_t labels,
                             std::vector<int64_t>& out) const {
    const PackedGrid& grid = problem_.packed[mode];
    if (!problem_.counts_labels()) return grid.add_linear(problem_.rows, inputs, targets, out);
    std::vector<int64_t> counted(width_, 0), all(width_, 0);
    if (!grid.add_linear(problem_.rows, inputs, targets, all) ||
        !grid.add_linear(problem_.rows, labels, targets, counted))
        return false;
    for (size_t row = 0; row < width_; ++row) out[row] += problem_.over_labels[row] ? counted[row] : all[row];
    return true;
}

bool PackedCosts::labelled_costs(size_t mode, int64_t labels, std::vector<int64_t>& out) const {
    std::vector<int64_t> sums(width_, 0);
    const PackedGrid& grid = problem_.packed[mode];
    if (!grid.measured() || !grid.add_linear(problem_.rows, labels, 0, sums)) return false;
    out.assign(problem_.rows.count(), 0);
    for (size_t i = 0; i < width_; ++i)
        if (problem_.scaled_by_labels[i]) out[problem_.rows.read[i]] = sums[i];
    return true;
}

// What the terms come to in a row of so many positions.
void PackedCosts::sum(int64_t positions, const std::vector<int64_t>& terms) {
    const int64_t by = std::max<int64_t>(positions, 1);
    for (size_t row = 0; row < width_; ++row) {
        const int64_t term = terms[row];
        int64_t scaled = 0;  // without a division where rows were measured
        if (term != 0) scaled = term > 0 ? (term + by / 2) / by : -((by / 2 - term) / by);
        sums_[row] = std::max<int64_t>(0, scaled + terms[stride_ + row]);
    }
}

void PackedCosts::scatter(std::vector<int64_t>& out) const {
    out.assign(problem_.rows.count(), 0);
    for (size_t row = 0; row < width_; ++row) out[problem_.rows.read[row]] = sums_[row];
}

const PackedCosts::Shares& PackedCosts::shares(size_t mode, size_t sample) {
    Shares& slot = shares_[mode][lengths_[sample]];
    if (slot.known) return slot;
    slot.known = true;
    const PackedGrid& grid = problem_.packed[mode];
    if (grid.measured())
        measured(grid, sample, slot);
    else
        derive(problem_.modes[mode], sample, slot);
    return slot;
}

void PackedCosts::derive(const Grid& grid, size_t sample, Shares& shares) const {
    const int64_t input = problem_.input_positions[sample], target = problem_.target_positions[sample];
    const int64_t own = std::max<int64_t>(input + target, 1);
    const std::vector<int64_t>& sizes = grid.sizes.points;
    const size_t count = sizes.size();
    const std::vector<int64_t> costs = grid.separately_at_lengths(problem_.rows, input, target);
    for (const int32_t row : problem_.rows.read)
        if (costs[row * count] == kAbsent) return;
    shares.covered = true;
    shares.terms.assign((count + 1) * 2 * stride_, 0);  // below the smallest size its cost is taken
    for (size_t i = 0; i < width_; ++i)
        shares.terms[i] = with_labels(i, sample, own * std::min(costs[problem_.rows.read[i] * count], kLargestShare));
    for (size_t cell = 0; cell < count; ++cell) {
        int64_t* const terms = shares.terms.data() + (cell + 1) * 2 * stride_;
        for (size_t i = 0; i < width_; ++i) {
            const int64_t* by_size = costs.data() + problem_.rows.read[i] * count;
            size_t last = cell;  // the largest size so far that was measured
            while (by_size[last] == kAbsent) --last;
            if (by_size[last] > kLargestShare) shares.covered = false;
            terms[stride_ + i] = divide(by_size[last], sizes[last]);
            terms[stride_ + i] = with_labels(i, sample, terms[stride_ + i]);
            if (last < cell || cell + 1 == count || by_size[cell + 1] == kAbsent) continue;
            // value(b) / b, with value(b) = low + rise * (b - size) / width and b = positions / own
            const int64_t width = sizes[cell + 1] - sizes[cell], rise = by_size[cell + 1] - by_size[cell];
            const int64_t from_start = divide(static_cast<__int128>(rise) * sizes[cell] * own, width);
            const int64_t constant = own * by_size[cell] - from_start;
            if (std::abs(constant) > own * kLargestShare) continue;  // sizes so close that the line is too steep
            terms[i] = with_labels(i, sample, constant);
            terms[stride_ + i] = with_labels(i, sample, divide(rise, width));
        }
    }
}

void PackedCosts::measured(const PackedGrid& grid, size_t sample, Shares& shares) const {
    shares.terms.assign(2 * stride_, 0);
    shares.covered = grid.attention_of(problem_.rows, problem_.input_positions[sample],
                                       problem_.target_positions[sample], shares.terms.data() + stride_);
    for (size_t i = 0; i < width_; ++i) shares.terms[stride_ + i] = with_labels(i, sample, shares.terms[stride_ + i]);
}

}  // namespace dynapipe
