#include "packed.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "checks.h"

namespace dynapipe {
namespace {

// Above this a share could overflow the sums over a row of 2^21 positions.
constexpr int64_t kLargestShare = int64_t{1} << 40;
constexpr int64_t kLargestRow = kLargestCoordinate;  // inputs, and targets

int64_t divide(__int128 value, __int128 by) {  // rounded to the nearest, halves up
    const __int128 twice = 2 * value + by;
    if (const int64_t small = twice, whole = 2 * by; small == twice && whole == 2 * by)
        return small / whole - (small % whole < 0);
    const __int128 quotient = twice / (2 * by);
    return static_cast<int64_t>(quotient - (twice % (2 * by) < 0));
}

void sum(const int64_t (&terms)[2 * kRows], int rows, int64_t positions, int64_t (&out)[kRows]) {
    const int64_t by = std::max<int64_t>(positions, 1);
    for (int row = 0; row < rows; ++row) {
        const int64_t scaled = terms[row] >= 0 ? (terms[row] + by / 2) / by : -((by / 2 - terms[row]) / by);
        out[row] = std::max<int64_t>(0, scaled + terms[kRows + row]);
    }
}

}  // namespace

PackedCosts::PackedCosts(const Problem& problem)
    : problem_(problem), before_(problem.chains.size()) {
    std::map<std::pair<int64_t, int64_t>, int32_t> different;
    for (int64_t i = 0; i < problem.samples(); ++i) {
        const std::pair<int64_t, int64_t> its{problem.input_positions[i], problem.target_positions[i]};
        lengths_.push_back(different.try_emplace(its, different.size()).first->second);
    }
    shares_.assign(problem.modes.size(), std::vector<Shares>(different.size()));
    for (size_t i = 1; i < before_.size(); ++i)
        if (problem.chains[i] >= 0 && problem.chains[i] == problem.chains[i - 1])
            before_[i] = before_[i - 1] + problem.input_positions[i - 1];
}

bool PackedCosts::layer_costs(size_t mode, const PackedRow& row, int64_t (&out)[kRows]) {
    if (row.inputs > kLargestRow || row.targets > kLargestRow) return false;
    const int64_t positions = row.inputs + row.targets;
    int64_t terms[2 * kRows] = {};
    for (int32_t sample : row.samples)
        if (!add(mode, sample, positions, terms)) return false;
    sum(terms, problem_.rows, positions, out);
    const PackedGrid& grid = problem_.packed[mode];
    if (grid.measured()) return grid.add_linear(row.inputs, row.targets, out);
    divide_parts(mode, row.samples, out);
    return true;
}

bool PackedCosts::share(size_t mode, int32_t sample, int64_t positions, int64_t (&out)[kRows]) {
    const int64_t input = problem_.input_positions[sample], target = problem_.target_positions[sample];
    const int64_t own = std::max<int64_t>(input + target, 1), scale = std::max(positions, own);
    int64_t terms[2 * kRows] = {};
    if (!add(mode, sample, scale, terms)) return false;
    sum(terms, problem_.rows, scale, out);
    const PackedGrid& grid = problem_.packed[mode];
    if (!grid.measured()) {
        divide_parts(mode, {sample}, out);
        return true;
    }
    int64_t linear[kRows] = {};
    if (!grid.add_linear(input * scale / own, target * scale / own, linear)) return false;
    for (int row = 0; row < problem_.rows; ++row) out[row] += divide(static_cast<__int128>(linear[row]) * own, scale);
    return true;
}

// Adds a sample's terms in a row of so many positions.
bool PackedCosts::add(size_t mode, size_t sample, int64_t positions, int64_t (&terms)[2 * kRows]) {
    const Shares& its = shares(mode, sample);
    if (!its.covered) return false;
    size_t cell = its.from.size() - 1;
    while (cell > 0 && its.from[cell] > positions) --cell;
    const int64_t* values = its.terms.data() + cell * 2 * kRows;
    for (int row = 0; row < 2 * kRows; ++row) terms[row] += values[row];  // those that are not read are 0
    if (problem_.is_piece(sample)) {
        const int64_t* extra = problem_.extras.data() + (mode * problem_.samples() + sample) * kEncoderRows;
        for (int row = 0; row < kEncoderRows; ++row) terms[kRows + row] += extra[row];
        for (int row = 0; row < kEncoderRows; ++row)  // all of it is attention's
            terms[kRows + kEncoderAttentionForward + row] += extra[row];
    }
    return true;
}

// Divides the derived costs of a row with pieces, in proportion to the operations of its samples over all their keys.
void PackedCosts::divide_parts(size_t mode, const std::vector<int32_t>& samples, int64_t (&out)[kRows]) const {
    if (std::none_of(samples.begin(), samples.end(), [&](int32_t sample) { return problem_.is_piece(sample); })) return;
    const int64_t* rates = problem_.part_rates.data() + mode * kPartRates;
    if (rates[kOfForward + kMlp] == 0) return;  // nobody knows
    __int128 positions = 0, pairs = 0;
    for (int32_t sample : samples) {
        const int64_t own = problem_.input_positions[sample];
        positions += own;
        pairs += static_cast<__int128>(own) * (own + before_[sample]);
    }
    const auto of = [&](int64_t value, int first, bool inner, bool mlp) {
        const __int128 linears = rates[first + kLinear] * positions, inside = rates[first + kInner] * pairs,
                       rest = rates[first + kMlp] * positions;
        return divide(value * (linears + inner * inside + mlp * rest), linears + inside + rest);
    };
    const int64_t forward = out[kEncoderForward];
    out[kEncoderWeight] = of(forward, kOfForward, false, true) * rates[kWeightPerMille] / 1000;
    out[kEncoderAttentionWeight] = of(forward, kOfForward, false, false) * rates[kWeightPerMille] / 1000;
    out[kEncoderAttentionForward] = of(forward, kOfForward, true, false);
    out[kEncoderAttentionBackward] = of(out[kEncoderBackward], kOfBackward, true, false);
    const int64_t stored = out[kEncoderStored], peak = out[kEncoderPeak];
    out[kEncoderAttentionStored] = of(stored, kOfAttentionStored, true, false);
    out[kEncoderMlpStored] = stored - of(stored, kOfMlpStored, true, false);
    out[kEncoderAttentionPeak] = out[kEncoderMlpPeak] = peak;
    if (rates[kMlpPeak] == 0) return;
    const auto at_most_peak = [&](int64_t once, __int128 units) {
        return static_cast<int64_t>(std::min<__int128>(once + units / kPeakUnit, peak));
    };
    out[kEncoderAttentionPeak] = at_most_peak(rates[kAttentionPeakOnce],
                                              rates[kAttentionPeak] * positions + rates[kAttentionPeakInner] * pairs);
    out[kEncoderMlpPeak] = at_most_peak(rates[kMlpPeakOnce], rates[kMlpPeak] * positions);
}

const PackedCosts::Shares& PackedCosts::shares(size_t mode, size_t sample) {
    Shares& slot = shares_[mode][lengths_[sample]];
    if (slot.known) return slot;
    slot.known = true;
    const PackedGrid& grid = problem_.packed[mode];
    if (grid.measured()) measured(grid, sample, slot);
    else derive(problem_.modes[mode], sample, slot);
    return slot;
}

void PackedCosts::derive(const Grid& grid, size_t sample, Shares& shares) const {
    const int64_t input = problem_.input_positions[sample], target = problem_.target_positions[sample];
    const int64_t own = std::max<int64_t>(input + target, 1);
    const std::vector<int64_t>& sizes = grid.sizes.points;
    const size_t count = sizes.size();
    const std::vector<int64_t> costs = grid.separately_at_lengths(input, target);
    for (int row = 0; row < problem_.rows; ++row)
        if (costs[row * count] == kAbsent) return;
    shares.covered = true;
    shares.terms.assign((count + 1) * 2 * kRows, 0);
    shares.from.push_back(0);  // below the smallest size its cost is taken
    for (int row = 0; row < problem_.rows; ++row) shares.terms[row] = own * std::min(costs[row * count], kLargestShare);
    for (size_t cell = 0; cell < count; ++cell) {
        shares.from.push_back(own * sizes[cell]);
        int64_t* const terms = shares.terms.data() + (cell + 1) * 2 * kRows;
        for (int row = 0; row < problem_.rows; ++row) {
            const int64_t* by_size = costs.data() + row * count;
            size_t last = cell;  // the largest size so far that was measured
            while (by_size[last] == kAbsent) --last;
            if (by_size[last] > kLargestShare) shares.covered = false;
            terms[kRows + row] = divide(by_size[last], sizes[last]);
            if (last < cell || cell + 1 == count || by_size[cell + 1] == kAbsent) continue;
            // value(b) / b, with value(b) = low + rise * (b - size) / width and b = positions / own
            const int64_t width = sizes[cell + 1] - sizes[cell], rise = by_size[cell + 1] - by_size[cell];
            const int64_t from_start = divide(static_cast<__int128>(rise) * sizes[cell] * own, width);
            const int64_t constant = own * by_size[cell] - from_start;
            if (std::abs(constant) > own * kLargestShare) continue;  // sizes so close that the line is too steep
            terms[row] = constant;
            terms[kRows + row] = divide(rise, width);
        }
    }
}

void PackedCosts::measured(const PackedGrid& grid, size_t sample, Shares& shares) const {
    int64_t attention[kRows] = {};
    shares.covered = grid.attention_of(problem_.input_positions[sample], problem_.target_positions[sample], attention);
    if (!shares.covered) return;
    shares.from = {0};
    shares.terms.assign(2 * kRows, 0);
    std::copy_n(attention, static_cast<size_t>(kRows), shares.terms.begin() + kRows);
}

}  // namespace dynapipe
