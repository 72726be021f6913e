#include "tables.h"

#include <algorithm>
#include <functional>

#include "checks.h"

namespace dynapipe {

Axis::Cell Axis::cell(int64_t x) const {
    x = std::clamp(x, points.front(), points.back());
    const size_t low = std::upper_bound(points.begin(), points.end(), x) - points.begin() - 1;
    const size_t high = std::min(low + 1, points.size() - 1);
    const int64_t part = x - points[low];
    return {low, high, part, part > 0 ? points[high] - points[low] : 1};
}

std::vector<int64_t> Grid::at_lengths(int64_t input, int64_t target) const {
    const size_t n = sizes.points.size(), ni = inputs.points.size(), nt = targets.points.size();
    std::vector<int64_t> out(kRows * n, kAbsent);
    if (!inputs.covers(input) || !targets.covers(target)) return out;
    const Axis::Cell i = inputs.cell(input), t = targets.cell(target);
    for (size_t k = 0; k < kRows * n; ++k) {
        const int64_t* low = values + (k * ni + i.low) * nt;
        const int64_t* high = values + (k * ni + i.high) * nt;
        const int64_t at_low = interpolate(low[t.low], high[t.low], i.part, i.width);
        const int64_t at_high = interpolate(low[t.high], high[t.high], i.part, i.width);
        out[k] = interpolate(at_low, at_high, t.part, t.width);
    }
    return out;
}

void Grid::check(size_t value_count) const {
    for (const Axis* axis : {&sizes, &inputs, &targets}) {
        const auto& points = axis->points;
        require(!points.empty() && points.front() >= 0 && points.back() <= kLargestCoordinate,
                "grid axes from 0 to 2^20");
        require(std::adjacent_find(points.begin(), points.end(), std::greater_equal<>()) == points.end(),
                "strictly increasing grid axes");
    }
    require(sizes.points.front() >= 1, "micro-batch sizes of at least 1");
    const size_t points = sizes.points.size() * inputs.points.size() * targets.points.size();
    require(value_count == kRows * points, "as many grid values as rows and axes have points");
    for (size_t p = 0; p < points; ++p) {
        for (size_t row = 0; row < kRows; ++row) {
            const int64_t value = values[row * points + p];
            require(value >= kAbsent && value <= kLargestCost, "costs of a layer from 0 to 2^42");
            require((value == kAbsent) == (values[p] == kAbsent), "grid points absent from all rows or from none");
        }
    }
}

void append_stage_costs(const std::vector<int64_t>& layer_costs, size_t sizes, const StageLayers& layers,
                        std::vector<int64_t>& out) {
    const int64_t e = layers.encoder, d = layers.decoder, h = layers.head ? 1 : 0;
    const size_t base = out.size();
    out.resize(base + kStageRows * sizes, kAbsent);
    for (size_t k = 0; k < sizes; ++k) {
        const auto at = [&](Row row) { return layer_costs[row * sizes + k]; };
        if (at(kEncoderForward) == kAbsent) continue;
        const int64_t given = e == 0 && d > 0 ? at(kEncodedStored) : 0;
        const int64_t layers_stored = given + e * at(kEncoderStored) + d * at(kDecoderStored);
        int64_t stage[kStageRows] = {};
        stage[kForward] = e * at(kEncoderForward) + d * at(kDecoderForward) + h * at(kHeadForward);
        stage[kBackward] = e * at(kEncoderBackward) + d * at(kDecoderBackward) + h * at(kHeadBackward);
        stage[kStored] = layers_stored + h * at(kHeadStored);
        if (e > 0) stage[kEncoderEnd] = (e - 1) * at(kEncoderStored) + at(kEncoderPeak);
        if (d > 0)
            stage[kDecoderEnd] =
                given + e * at(kEncoderStored) + (d - 1) * at(kDecoderStored) + at(kDecoderPeak);
        stage[kHeadEnd] = h * (layers_stored + at(kHeadPeak));
        if (*std::max_element(stage, stage + kStageRows) > kLargestCost) continue;
        for (int row = 0; row < kStageRows; ++row) out[base + row * sizes + k] = stage[row];
    }
}

}  // namespace dynapipe
