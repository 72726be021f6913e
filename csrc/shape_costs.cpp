#include "shape_costs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "checks.h"

namespace dynapipe {

const PassCosts* ShapeCosts::at(const MicroBatch& batch) {
    int64_t input = 0, target = 0;
    for (int64_t i = batch.first; i < batch.first + batch.size; ++i) {
        input = std::max(input, problem_.inputs[i]);
        target = std::max(target, problem_.targets[i]);
    }
    const uint64_t lengths = static_cast<uint64_t>(input) << 21 | static_cast<uint64_t>(target);
    std::unordered_map<int64_t, Entry>& sizes = entries_[lengths * problem_.modes.size() + batch.mode];
    const auto found = sizes.find(batch.size);
    if (found != sizes.end()) return found->second.usable ? &found->second.costs : nullptr;
    Entry& entry = sizes[batch.size];
    compute(batch, input, target, entry);
    return entry.usable ? &entry.costs : nullptr;
}

void ShapeCosts::compute(const MicroBatch& batch, int64_t input, int64_t target, Entry& entry) {
    const Grid& grid = problem_.modes[batch.mode];
    const int64_t stages = problem_.layers.size(), points = grid.sizes.points.size();
    if (!grid.sizes.covers(batch.size)) return;
    std::vector<int64_t>& rows = knots_[batch.mode][static_cast<uint64_t>(input) << 21 | static_cast<uint64_t>(target)];
    if (rows.empty()) {
        const std::vector<int64_t> knots = grid.knots(input, target);
        for (const StageLayers& stage : problem_.layers) append_stage_knots(knots, points, stage, rows);
    }
    const Axis::Cell cell = grid.sizes.cell(batch.size);
    entry.values.assign(6 * stages, 0);
    int64_t* const out = entry.values.data();
    for (int64_t v = 0; v < stages; ++v) {
        int64_t at[kStageRows];
        for (int row = 0; row < kStageRows; ++row) {
            const int64_t* values = rows.data() + (v * kStageRows + row) * points;
            at[row] = interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
        }
        if (at[kForward] == kAbsent) return;
        out[v] = at[kForward];
        out[stages + v] = at[kBackward];
        out[2 * stages + v] = at[kStored];
        out[3 * stages + v] = peak_of(at);
        if (problem_.shape.model_state[v % problem_.shape.stages] + out[3 * stages + v] > problem_.shape.memory_limit)
            return;
    }
    for (int64_t v = 0; v + 1 < stages; ++v) {
        const Links& links = problem_.links;
        const int64_t input_bytes = batch.size * input * links.bytes_per_position;
        const int64_t target_bytes = batch.size * target * links.bytes_per_position;
        out[4 * stages + v] = transfer(v, input_bytes + (links.decoder_forward[v] ? target_bytes : 0));
        out[5 * stages + v + 1] = transfer(v, input_bytes + (links.decoder_backward[v] ? target_bytes : 0));
    }
    entry.costs = {out, out + stages, out + 2 * stages, out + 3 * stages, out + 4 * stages, out + 5 * stages};
    entry.usable = true;
}

int64_t ShapeCosts::transfer(int64_t boundary, int64_t bytes) const {
    const Links& links = problem_.links;
    double least = std::numeric_limits<double>::infinity();
    for (size_t way = boundary; way < links.gbps.size(); way += problem_.layers.size() - 1)
        least = std::min(least, links.latency_ns[way] + static_cast<double>(bytes * 8) / links.gbps[way]);
    return static_cast<int64_t>(std::nearbyint(least));
}

}  // namespace dynapipe
