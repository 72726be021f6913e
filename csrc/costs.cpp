#include "costs.h"

namespace dynapipe {
namespace {

int64_t peak_of(const int64_t (&at)[kStageRows]) {
    return std::max({at[kStored], at[kEncoderEnd], at[kDecoderEnd], at[kHeadEnd]});
}

}  // namespace

CostCache::CostCache(const Problem& problem) : problem_(problem), by_lengths_(problem.modes.size()) {
    for (const StageLayers& stage : problem.layers) {
        const auto found = std::find(kinds_.begin(), kinds_.end(), stage);
        kind_of_.push_back(found - kinds_.begin());
        if (found == kinds_.end()) kinds_.push_back(stage);
    }
    kind_summaries_.resize(kinds_.size());
}

std::unique_ptr<CostCache::BySize> CostCache::make_by_size(size_t mode, int64_t input, int64_t target) {
    const Grid& grid = problem_.modes[mode];
    const std::vector<int64_t> layer_costs = grid.at_lengths(input, target);
    auto made = std::make_unique<BySize>();
    made->sizes_ = &grid.sizes;
    const size_t sizes = grid.sizes.points.size();
    size_t present = sizes;
    while (present > 0 && layer_costs[present - 1] == kAbsent) --present;
    if (present == 0) return made;
    made->summaries_.resize(std::min<int64_t>(problem_.samples(), grid.sizes.points[present - 1]));
    made->stage_costs_.reserve(kinds_.size() * kStageRows * sizes);
    for (const StageLayers& kind : kinds_) append_stage_costs(layer_costs, sizes, kind, made->stage_costs_);
    return made;
}

// Costs of a kind of stage in a cell of the axis of sizes; false where there are none.
bool CostCache::interpolate_kind(const BySize& by_size, size_t kind, const Axis::Cell& cell, StageCosts& at) const {
    const size_t sizes = by_size.sizes_->points.size();
    const int64_t* rows = by_size.stage_costs_.data() + kind * kStageRows * sizes;
    for (int row = 0; row < kStageRows; ++row) {
        const int64_t* values = rows + row * sizes;
        at[row] = interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
    }
    return at[kForward] != kAbsent;
}

Summary CostCache::summarize(const BySize& by_size, int64_t size) {
    const Axis::Cell cell = by_size.sizes_->cell(size);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
        StageCosts at;
        if (!interpolate_kind(by_size, kind, cell, at)) return {0, 0, 0, true};
        const int64_t time = at[kForward] + (problem_.pipeline.forward_only ? 0 : at[kBackward]);
        kind_summaries_[kind] = {time, at[kStored], peak_of(at) - at[kStored]};
    }
    const size_t stages = problem_.stages(), options = problem_.options();
    int64_t slowest = 0, sum = 0;
    uint32_t fitting = (uint32_t{1} << options) - 1;
    for (size_t stage = 0; stage < stages; ++stage) {
        KindSummary total{0, 0, 0};
        for (size_t v = stage; v < kind_of_.size(); v += stages) {
            const KindSummary& costs = kind_summaries_[kind_of_[v]];
            total.time += costs.time;
            total.stored += costs.stored;
            total.above = std::max(total.above, costs.above);
        }
        slowest = std::max(slowest, total.time);
        sum += total.time;
        for (size_t option = 0; option < options; ++option) {
            const int64_t held = problem_.pipeline.forward_only ? 1 : problem_.in_flight[option * stages + stage];
            if (total.stored * held + total.above > problem_.memory(stage)) fitting &= ~(uint32_t{1} << option);
        }
    }
    return {slowest, sum - slowest, fitting, true};
}

const CostRow& CostCache::row(size_t mode, const Shape& shape) {
    BySize& by_size = this->by_size(mode, shape.input, shape.target);
    const auto [found, added] = by_size.rows_.try_emplace(shape.size);
    if (added) compute(by_size, shape, found->second);
    return found->second;
}

void CostCache::compute(const BySize& by_size, const Shape& shape, CostRow& row) const {
    const int64_t virtual_stages = problem_.layers.size();
    row.values.assign(6 * virtual_stages, 0);
    int64_t* const out = row.values.data();
    row.costs = {out, out + virtual_stages, out + 2 * virtual_stages, out + 3 * virtual_stages,
                 out + 4 * virtual_stages, out + 5 * virtual_stages};
    if (by_size.stage_costs_.empty() || !by_size.sizes_->covers(shape.size)) return;
    const Axis::Cell cell = by_size.sizes_->cell(shape.size);
    row.fits = true;
    for (int64_t v = 0; v < virtual_stages; ++v) {
        StageCosts at;
        if (!interpolate_kind(by_size, kind_of_[v], cell, at)) {
            row.fits = false;
            return;
        }
        out[v] = at[kForward];
        out[virtual_stages + v] = at[kBackward];
        out[2 * virtual_stages + v] = at[kStored];
        out[3 * virtual_stages + v] = peak_of(at);
        row.fits &= peak_of(at) <= problem_.memory(v % problem_.stages());
    }
    row.covered = true;
    const Links& links = problem_.links;
    const int64_t input_bytes = shape.size * shape.input * links.bytes_per_position;
    const int64_t target_bytes = shape.size * shape.target * links.bytes_per_position;
    for (int64_t v = 0; v + 1 < virtual_stages; ++v) {
        out[4 * virtual_stages + v] = links.transfer_ns(v, input_bytes + (links.decoder_forward[v] ? target_bytes : 0));
        out[5 * virtual_stages + v + 1] =
            links.transfer_ns(v, input_bytes + (links.decoder_backward[v] ? target_bytes : 0));
    }
}

}  // namespace dynapipe
