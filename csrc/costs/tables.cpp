#include "costs/tables.h"

#include <algorithm>
#include <functional>
#include <initializer_list>

#include "checks.h"

namespace dynapipe {

Axis::Cell Axis::cell(int64_t x) const {
    x = std::clamp(x, points.front(), points.back());
    const size_t low = std::upper_bound(points.begin(), points.end(), x) - points.begin() - 1;
    const size_t high = std::min(low + 1, points.size() - 1);
    const int64_t part = x - points[low];
    return {low, high, part, part > 0 ? points[high] - points[low] : 1};
}

std::vector<int64_t> Grid::at(const Rows& rows, const View& from, int64_t input, int64_t target) const {
    const size_t n = sizes.points.size(), ni = inputs.points.size(), nt = targets.points.size();
    if (!inputs.covers(input) || !targets.covers(target)) return std::vector<int64_t>(rows.count() * n, kAbsent);
    std::vector<int64_t> out(rows.count() * n, 0);
    const Axis::Cell i = inputs.cell(input), t = targets.cell(target);
    for (const int32_t row : rows.read) {
        for (size_t k = row * n; k < (row + 1) * n; ++k) {
            const int64_t* low = &from.values[(k * ni + i.low) * nt];
            const int64_t* high = &from.values[(k * ni + i.high) * nt];
            const int64_t at_low = interpolate(low[t.low], high[t.low], i.part, i.width);
            const int64_t at_high = interpolate(low[t.high], high[t.high], i.part, i.width);
            out[k] = interpolate(at_low, at_high, t.part, t.width);
        }
    }
    return out;
}

namespace {

// A point of planes [first][second]: where they are interpolated.
struct Place {
    Axis::Cell first, second;
    size_t width;  // of a plane

    int64_t of(const int64_t* plane) const {
        const int64_t* low = plane + first.low * width;
        const int64_t* high = plane + first.high * width;
        return interpolate(interpolate(low[second.low], high[second.low], first.part, first.width),
                           interpolate(low[second.high], high[second.high], first.part, first.width), second.part,
                           second.width);
    }
};

// Values of the rows that are read at a point of their planes; false above the planes, and where a corner with weight
// is absent.
template <typename Take>
bool at_point(const Rows& rows, const Axis& first, const Axis& second, const View& planes, int64_t x, int64_t y,
              Take take) {
    if (!first.covers(x) || !second.covers(y)) return false;
    const size_t points = first.points.size() * second.points.size();
    const Place place{first.cell(x), second.cell(y), second.points.size()};
    for (size_t i = 0; i < rows.read.size(); ++i) {
        const int64_t value = place.of(&planes.values[rows.read[i] * points]);
        if (value == kAbsent) return false;
        take(i, value);
    }
    return true;
}

void check_axes(std::initializer_list<const Axis*> axes) {
    for (const Axis* axis : axes) {
        const auto& points = axis->points;
        require(!points.empty() && points.front() >= 0 && points.back() <= kLargestCoordinate,
                "grid axes from 0 to 2^20");
        require(std::adjacent_find(points.begin(), points.end(), std::greater_equal<>()) == points.end(),
                "strictly increasing grid axes");
    }
}

void check_costs(const View& view) {
    for (const int64_t value : view.values)
        require(value >= kAbsent && value <= kLargestCost, "costs of a module from 0 to 2^42");
}

}  // namespace

bool PackedGrid::add_linear(const Rows& rows, int64_t row_input, int64_t row_target, std::vector<int64_t>& out) const {
    return at_point(rows, row_inputs, row_targets, linear, row_input, row_target,
                    [&](size_t i, int64_t value) { out[i] += value; });
}

bool PackedGrid::attention_of(const Rows& rows, int64_t input, int64_t target, int64_t* out) const {
    return at_point(rows, inputs, targets, attention, input, target, [&](size_t i, int64_t value) { out[i] = value; });
}

void PackedGrid::check(size_t rows) const {
    if (!measured()) return;
    check_axes({&row_inputs, &row_targets, &inputs, &targets});
    require(linear.values.size() == rows * row_inputs.points.size() * row_targets.points.size() &&
                attention.values.size() == rows * inputs.points.size() * targets.points.size(),
            "as many grid values as rows and axes have points");
    check_costs(linear);
    check_costs(attention);
}

void Grid::check(size_t rows) const {
    check_axes({&sizes, &inputs, &targets});
    require(sizes.points.front() >= 1, "micro-batch sizes of at least 1");
    require(values.values.size() == rows * points() && separate.values.size() == values.values.size(),
            "as many grid values as rows and axes have points");
    check_costs(values);
    check_costs(separate);
    for (size_t i = 0; i < values.values.size(); ++i)
        require((values.values[i] == kAbsent) == (values.values[i % points()] == kAbsent),
                "grid points absent from all rows or from none");
}

StageModules::StageModules(std::span<const int64_t> modules, size_t kinds)
    : modules_(modules.begin(), modules.end()), counts_(kinds, 0) {
    require(modules.size() <= kMostModules, "at most 131072 modules on a stage");
    std::vector<std::vector<int64_t>> before(kinds);
    for (const int64_t kind : modules_) {
        require(kind >= 0 && kind < static_cast<int64_t>(kinds), "kinds of modules that there are");
        before[kind] = counts_;
        ++counts_[kind];
    }
    for (size_t kind = 0; kind < kinds; ++kind) {
        if (!holds(kind)) continue;
        held_.push_back(kind);
        last_.push_back({kind, std::move(before[kind])});
    }
}

void StageModules::keep_peaks(const Rows& rows) {
    std::erase_if(last_, [&](const Last& last) {
        return std::find(rows.read.begin(), rows.read.end(), last.kind * kQuantities + kPeak) == rows.read.end();
    });
}

void StageModules::append_costs(const std::vector<int64_t>& costs, size_t sizes, size_t ends,
                                std::vector<int64_t>& out) const {
    const size_t base = out.size(), rows = kStageQuantities + ends;
    out.resize(base + rows * sizes, modules_.empty() || sizes == 1 ? 0 : kAbsent);
    if (modules_.empty()) return;
    if (sizes == 1) {
        if (!costs_at(costs, 1, 0, &out[base])) std::fill(out.begin() + base, out.end(), kAbsent);
        return;
    }
    std::vector<int64_t> stage(rows, 0);
    for (size_t k = 0; k < sizes; ++k)
        if (costs_at(costs, sizes, k, stage.data()))
            for (size_t row = 0; row < rows; ++row) out[base + row * sizes + k] = stage[row];
}

// The costs at one size of those of modules: [kStageQuantities + ends]; false where one is absent or above the limit.
bool StageModules::costs_at(const std::vector<int64_t>& costs, size_t sizes, size_t k, int64_t* stage) const {
    const auto at = [&](size_t kind, Quantity quantity) { return costs[(kind * kQuantities + quantity) * sizes + k]; };
    if (at(held_[0], kForward) == kAbsent) return false;
    const int64_t entry = at(modules_[0], kEntryStored);
    int64_t forward = 0, backward = 0, stored = entry, weight = 0;
    for (const size_t kind : held_) {
        forward += counts_[kind] * at(kind, kForward);
        backward += counts_[kind] * at(kind, kBackward);
        stored += counts_[kind] * at(kind, kStored);
        weight += counts_[kind] * at(kind, kWeight);
    }
    if (correction_ != Correction{}) {
        if (std::max({forward, backward, weight}) > kLargestCost) return false;
        const auto corrected = [](int64_t ns, int64_t percent) { return (ns * percent + 50) / 100; };
        const int64_t input = std::max<int64_t>(backward - weight, 0);
        forward = corrected(forward, correction_.forward);
        weight = corrected(weight, correction_.weight);
        backward = corrected(input, correction_.input) + weight;
    }
    stage[kForward] = forward;
    stage[kBackward] = backward;
    stage[kStored] = stored;
    stage[kPeak] = at(modules_[0], kEntryPeak);
    stage[kWeight] = weight;
    for (size_t end = 0; end < last_.size(); ++end) {
        int64_t peak = entry + at(last_[end].kind, kPeak);
        for (const size_t kind : held_) peak += last_[end].before[kind] * at(kind, kStored);
        stage[kStageQuantities + end] = peak;
    }
    return *std::max_element(stage, stage + kStageQuantities + last_.size()) <= kLargestCost;
}

std::vector<StageModules> divided_at(std::span<const int64_t> modules, std::span<const int64_t> cuts, size_t kinds) {
    std::vector<StageModules> stages;
    int64_t first = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
        const int64_t end = i < cuts.size() ? cuts[i] : static_cast<int64_t>(modules.size());
        require(first <= end && end <= static_cast<int64_t>(modules.size()), "cuts in order between modules");
        stages.emplace_back(modules.subspan(first, end - first), kinds);
        first = end;
    }
    return stages;
}

}  // namespace dynapipe
