#include "tables.h"

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

std::vector<int64_t> Grid::at(const int64_t* from, int64_t input, int64_t target) const {
    const size_t n = sizes.points.size(), ni = inputs.points.size(), nt = targets.points.size();
    std::vector<int64_t> out(kRows * n, kAbsent);
    if (!inputs.covers(input) || !targets.covers(target)) return out;
    const Axis::Cell i = inputs.cell(input), t = targets.cell(target);
    for (size_t k = 0; k < rows * n; ++k) {
        const int64_t* low = from + (k * ni + i.low) * nt;
        const int64_t* high = from + (k * ni + i.high) * nt;
        const int64_t at_low = interpolate(low[t.low], high[t.low], i.part, i.width);
        const int64_t at_high = interpolate(low[t.high], high[t.high], i.part, i.width);
        out[k] = interpolate(at_low, at_high, t.part, t.width);
    }
    return out;
}

namespace {

// Values at a point of a plane [first][second]; absent where a corner with weight is, and above the plane.
int64_t at_point(const Axis& first, const Axis& second, const int64_t* plane, int64_t x, int64_t y) {
    if (!first.covers(x) || !second.covers(y)) return kAbsent;
    const Axis::Cell i = first.cell(x), j = second.cell(y);
    const int64_t* low = plane + i.low * second.points.size();
    const int64_t* high = plane + i.high * second.points.size();
    return interpolate(interpolate(low[j.low], high[j.low], i.part, i.width),
                       interpolate(low[j.high], high[j.high], i.part, i.width), j.part, j.width);
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

void check_costs(const int64_t* values, size_t count) {
    for (size_t i = 0; i < count; ++i)
        require(values[i] >= kAbsent && values[i] <= kLargestCost, "costs of a layer from 0 to 2^42");
}

}  // namespace

bool PackedGrid::add_linear(int64_t row_input, int64_t row_target, int64_t (&out)[kRows]) const {
    for (int row = 0; row < rows; ++row) {
        const int64_t* plane = linear + row * row_inputs.points.size() * row_targets.points.size();
        const int64_t value = at_point(row_inputs, row_targets, plane, row_input, row_target);
        if (value == kAbsent) return false;
        out[row] += value;
    }
    return true;
}

bool PackedGrid::attention_of(int64_t input, int64_t target, int64_t (&out)[kRows]) const {
    for (int row = 0; row < rows; ++row) {
        const int64_t* plane = attention + row * inputs.points.size() * targets.points.size();
        out[row] = at_point(inputs, targets, plane, input, target);
        if (out[row] == kAbsent) return false;
    }
    return true;
}

void PackedGrid::check(size_t linear_count, size_t attention_count) const {
    if (!measured()) return;
    check_axes({&row_inputs, &row_targets, &inputs, &targets});
    require(linear_count == kRows * row_inputs.points.size() * row_targets.points.size() &&
                attention_count == kRows * inputs.points.size() * targets.points.size(),
            "as many grid values as rows and axes have points");
    check_costs(linear, linear_count);
    check_costs(attention, attention_count);
}

void Grid::check(size_t value_count, size_t separate_count) const {
    check_axes({&sizes, &inputs, &targets});
    require(sizes.points.front() >= 1, "micro-batch sizes of at least 1");
    require(value_count == kRows * points() && separate_count == value_count,
            "as many grid values as rows and axes have points");
    check_costs(values, value_count);
    check_costs(separate, separate_count);
    require(absent_alike(values, kRows), "grid points absent from all rows or from none");
}

// Whether `planes` times the grid's points are absent where the first row of the values is.
bool Grid::absent_alike(const int64_t* from, size_t planes) const {
    const size_t count = points();
    for (size_t plane = 0; plane < planes; ++plane, from += count)
        for (size_t p = 0; p < count; ++p)
            if ((from[p] == kAbsent) != (values[p] == kAbsent)) return false;
    return true;
}

void Grid::check_stages(size_t count, size_t virtual_stages) const {
    require(count == virtual_stages * kRows * points(), "grid values of every virtual stage, or of none");
    check_costs(of_stages, count);
    require(absent_alike(of_stages, virtual_stages * kRows), "grid points absent from all stages or from none");
}

namespace {

// What layers of one kind cost together, from one layer's costs: its rows begin at `costs`, `step` apart; those of its
// halves at `halves`.
struct LayersCosts {
    int64_t forward, backward, stored, weight;
    int64_t end;  // the highest peak, above what is stored before the first of them
};

LayersCosts costs_of(const Layers& layers, const int64_t* costs, int64_t weight, const int64_t* halves, size_t step) {
    if (!layers.any()) return {0, 0, 0, 0, 0};
    const int64_t forward = costs[0], backward = costs[step], stored = costs[2 * step], peak = costs[3 * step];
    LayersCosts out{layers.whole * forward, layers.whole * backward, layers.whole * stored, layers.whole * weight, 0};
    int64_t halves_end = 0;
    if (layers.mlp + layers.attention > 0) {
        const int64_t attention_stored = halves[2 * step], attention_peak = halves[3 * step];
        const int64_t mlp_stored = halves[4 * step], mlp_peak = halves[5 * step], its_weight = halves[6 * step];
        out.forward += layers.attention * halves[0] + layers.mlp * (forward - halves[0]);
        out.backward += layers.attention * halves[step] + layers.mlp * (backward - halves[step]);
        out.stored += layers.attention * attention_stored + layers.mlp * mlp_stored;
        out.weight += layers.attention * its_weight + layers.mlp * (weight - its_weight);
        // What attention stored may still be held when what is before it peaks: recomputed in full, it is the output.
        halves_end = std::max(layers.mlp * (mlp_peak + layers.attention * attention_stored),
                              layers.attention * (out.stored - attention_stored + attention_peak));
    }
    out.end = std::max(halves_end, layers.whole > 0 ? out.stored - stored + peak : 0);
    return out;
}

}  // namespace

void append_stage_costs(const std::vector<int64_t>& layer_costs, size_t sizes, const StageLayers& layers,
                        std::vector<int64_t>& out) {
    const int64_t h = layers.head ? 1 : 0;
    const size_t base = out.size();
    out.resize(base + kStageRows * sizes, kAbsent);
    for (size_t k = 0; k < sizes; ++k) {
        const auto at = [&](Row row) { return layer_costs[row * sizes + k]; };
        if (at(kEncoderForward) == kAbsent) continue;
        const auto of = [&](const Layers& kind, Row first, Row weight, Row halves) {
            const int64_t* costs = layer_costs.data() + k;
            return costs_of(kind, costs + first * sizes, at(weight), costs + halves * sizes, sizes);
        };
        const LayersCosts e = of(layers.encoder, kEncoderForward, kEncoderWeight, kEncoderAttentionForward);
        const LayersCosts d = of(layers.decoder, kDecoderForward, kDecoderWeight, kDecoderAttentionForward);
        const int64_t given = !layers.encoder.any() && layers.decoder.any() ? at(kEncodedStored) : 0;
        const int64_t layers_stored = given + e.stored + d.stored;
        int64_t stage[kStageRows] = {};
        stage[kForward] = e.forward + d.forward + h * at(kHeadForward);
        stage[kBackward] = e.backward + d.backward + h * at(kHeadBackward);
        stage[kStored] = layers_stored + h * at(kHeadStored);
        stage[kEncoderEnd] = e.end;
        if (layers.decoder.any()) stage[kDecoderEnd] = given + e.stored + d.end;
        stage[kHeadEnd] = h * (layers_stored + at(kHeadPeak));
        stage[kWeight] = e.weight + d.weight;
        if (*std::max_element(stage, stage + kStageRows) > kLargestCost) continue;
        for (int row = 0; row < kStageRows; ++row) out[base + row * sizes + k] = stage[row];
    }
}

}  // namespace dynapipe
