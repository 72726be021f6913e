#include "costs.h"

namespace dynapipe {
namespace {

int64_t peak_of(const int64_t (&at)[kStageRows]) {
    return std::max({at[kStored], at[kEncoderEnd], at[kDecoderEnd], at[kHeadEnd]});
}

int64_t round_up(int64_t positions, int64_t multiple) { return (positions + multiple - 1) / multiple * multiple; }

}  // namespace

CostCache::CostCache(const Problem& problem)
    : problem_(problem), by_lengths_(problem.modes.size()), packed_(problem) {
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
    for (const StageLayers& kind : kinds_) {
        if (kind.own < 0) append_stage_costs(layer_costs, sizes, kind, made->stage_costs_);
        else append_stage_costs(grid.of_stage_at_lengths(kind.own, input, target), sizes, kind, made->stage_costs_);
    }
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

void CostCache::compute(const BySize& by_size, const Shape& shape, CostRow& row) {
    if (by_size.stage_costs_.empty() || !by_size.sizes_->covers(shape.size)) {
        by_kind_.clear();
    } else {
        const Axis::Cell cell = by_size.sizes_->cell(shape.size);
        by_kind_.resize(kinds_.size() * kStageRows);
        for (size_t kind = 0; kind < kinds_.size(); ++kind) {
            StageCosts at;
            if (!interpolate_kind(by_size, kind, cell, at)) {
                by_kind_.clear();
                break;
            }
            std::copy_n(at, static_cast<size_t>(kStageRows), by_kind_.begin() + kind * kStageRows);
        }
    }
    const int64_t bytes = shape.size * problem_.links.bytes_per_position;
    fill(bytes * shape.input, bytes * shape.target, row);
}

int64_t CostCache::uncovered_stage(size_t mode, const Shape& shape) {
    const BySize& by_size = this->by_size(mode, shape.input, shape.target);
    if (by_size.stage_costs_.empty() || !by_size.sizes_->covers(shape.size)) return 0;
    const Axis::Cell cell = by_size.sizes_->cell(shape.size);
    StageCosts at;
    for (size_t v = 0; v < kind_of_.size(); ++v)
        if (!interpolate_kind(by_size, kind_of_[v], cell, at)) return v;
    return -1;
}

void CostCache::packed_row(size_t mode, const std::vector<int32_t>& samples, CostRow& row) {
    int64_t inputs = 0, targets = 0;
    for (int32_t sample : samples) {
        inputs += problem_.input_positions[sample];
        targets += problem_.target_positions[sample];
    }
    inputs = round_up(inputs, problem_.row_multiple);
    targets = round_up(targets, problem_.row_multiple);
    int64_t costs[kRows] = {};
    by_kind_.clear();
    if (packed_.layer_costs(mode, {samples, inputs, targets}, costs)) stage_costs(costs);
    const int64_t bytes = problem_.links.bytes_per_position;
    fill(bytes * inputs, bytes * targets, row);
}

bool CostCache::shares(size_t mode, int32_t sample, int64_t positions, std::vector<Share>& by_kind) {
    int64_t costs[kRows] = {};
    if (!packed_.share(mode, sample, positions, costs)) return false;
    stage_costs(costs);
    if (by_kind_.empty()) return false;
    by_kind.clear();
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
        const int64_t* at = by_kind_.data() + kind * kStageRows;
        by_kind.push_back({at[kForward], at[kBackward], at[kStored]});
    }
    return true;
}

// Costs of every kind of stage from one layer's, into `by_kind_`; none where one is above the limit.
void CostCache::stage_costs(const int64_t (&costs)[kRows]) {
    layer_costs_.assign(costs, costs + kRows);
    by_kind_.clear();
    for (const StageLayers& kind : kinds_) {
        append_stage_costs(layer_costs_, 1, kind, by_kind_);
        if (by_kind_[by_kind_.size() - kStageRows] == kAbsent) {
            by_kind_.clear();
            return;
        }
    }
}

// A row from the costs in `by_kind_`: [kinds][kStageRows], none where the cost model does not cover the micro-batch.
void CostCache::fill(int64_t input_bytes, int64_t target_bytes, CostRow& row) const {
    const int64_t virtual_stages = problem_.layers.size();
    row.values.assign(kCosts * virtual_stages, 0);
    int64_t* const out = row.values.data();
    row.costs = {out, out + virtual_stages, out + 2 * virtual_stages, out + 3 * virtual_stages,
                 out + 4 * virtual_stages, out + 5 * virtual_stages, out + 6 * virtual_stages};
    row.covered = row.fits = !by_kind_.empty();
    if (!row.covered) return;
    for (int64_t v = 0; v < virtual_stages; ++v) {
        StageCosts at;
        std::copy_n(by_kind_.begin() + kind_of_[v] * kStageRows, static_cast<size_t>(kStageRows), at);
        out[v] = at[kForward];
        out[virtual_stages + v] = at[kBackward];
        out[2 * virtual_stages + v] = at[kStored];
        out[3 * virtual_stages + v] = peak_of(at);
        if (problem_.division != Division::kOff) out[6 * virtual_stages + v] = std::min(at[kWeight], at[kBackward]);
        row.fits &= peak_of(at) <= problem_.memory(v % problem_.stages());
    }
    const Links& links = problem_.links;
    for (int64_t v = 0; v + 1 < virtual_stages; ++v) {
        out[4 * virtual_stages + v] = links.transfer_ns(v, input_bytes + (links.decoder_forward[v] ? target_bytes : 0));
        out[5 * virtual_stages + v + 1] =
            links.transfer_ns(v, input_bytes + (links.decoder_backward[v] ? target_bytes : 0));
    }
}

}  // namespace dynapipe
