#include "costs/costs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "costs/memory.h"

namespace dynapipe {
namespace {

int64_t round_up(int64_t positions, int64_t multiple) {
    return (positions + multiple - 1) / multiple * multiple;
}

#ifdef DYNAPIPE_CHECKED
// A row that is priced too high would merely be refused by the search, and one priced too low only if it is taken.
void require_same_price(const CostRow& row, const CostRow& anew, const std::vector<int32_t>& samples) {
    if (row.covered == anew.covered && row.values == anew.values) return;
    const auto at = std::mismatch(row.values.begin(), row.values.end(), anew.values.begin());
    std::fprintf(stderr, "a row follows from another one at another price than its own: %zu samples, covered %d and %d",
                 samples.size(), row.covered, anew.covered);
    if (at.first != row.values.end()) {
        const size_t place = at.first - row.values.begin(), stages = row.values.size() / kCosts;
        std::fprintf(stderr, ", %s of virtual stage %zu %lld and %lld", kCostNames[place / stages], place % stages,
                     static_cast<long long>(*at.first), static_cast<long long>(*at.second));
    }
    std::fprintf(stderr, "; its samples:");
    for (int32_t sample : samples) std::fprintf(stderr, " %d", sample);
    std::fprintf(stderr, "\n");
    std::abort();
}
#endif

}  // namespace

CostCache::CostCache(const Problem& problem)
    : problem_(problem), by_lengths_(problem.modes.size()), labelled_rows_(problem.modes.size()), packed_(problem) {
    for (const StageModules& stage : problem.modules) {
        const auto found = std::find(types_.begin(), types_.end(), stage);
        type_of_.push_back(found - types_.begin());
        if (found == types_.end()) types_.push_back(stage);
    }
    type_summaries_.resize(types_.size());
    for (const StageModules& type : types_) ends_ = std::max(ends_, type.ends());
    label_sum_ = std::accumulate(problem.labels.begin(), problem.labels.end(), int64_t{0});
    input_sum_ = std::accumulate(problem.inputs.begin(), problem.inputs.end(), int64_t{0});
}

std::unique_ptr<CostCache::BySize> CostCache::make_by_size(size_t mode, int64_t input, int64_t target) {
    const Grid& grid = problem_.modes[mode];
    std::vector<int64_t> module_costs = grid.at_lengths(problem_.rows, input, target);
    auto made = std::make_unique<BySize>();
    made->mode_ = mode;
    made->sizes_ = &grid.sizes;
    made->input_ = input;
    made->target_ = target;
    const size_t sizes = grid.sizes.points.size();
    size_t present = sizes;
    while (present > 0 && module_costs[problem_.rows.read[0] * sizes + present - 1] == kAbsent) --present;
    if (present == 0) return made;
    made->summaries_.resize(std::min<int64_t>(problem_.samples(), grid.sizes.points[present - 1]));
    made->stage_costs_.reserve(types_.size() * (kStageQuantities + ends_) * sizes);
    if (problem_.counts_labels()) {
        std::vector<int64_t> labelled(module_costs.size(), 0);
        for (size_t i = 0; i < problem_.rows.read.size(); ++i) {
            const size_t row = problem_.rows.read[i] * sizes;
            if (!problem_.scaled_by_labels[i]) continue;
            for (size_t k = 0; k < sizes; ++k)
                if (module_costs[row + k] != kAbsent) std::swap(labelled[row + k], module_costs[row + k]);
        }
        types_[type_of_.back()].append_costs(labelled, sizes, ends_, made->labelled_costs_);
    }
    for (const StageModules& type : types_) type.append_costs(module_costs, sizes, ends_, made->stage_costs_);
    return made;
}

// Costs of a type of stage in a cell of the axis of sizes; false where there are none.
bool CostCache::interpolate_type(const BySize& by_size, size_t type, const Axis::Cell& cell, StageCosts& at) const {
    const size_t sizes = by_size.sizes_->points.size();
    const int64_t* rows = by_size.stage_costs_.data() + type * (kStageQuantities + ends_) * sizes;
    const auto value = [&](size_t row) {
        const int64_t* values = rows + row * sizes;
        return interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
    };
    for (int row = 0; row < kStageQuantities; ++row) at[row] = value(row);
    at[kPeak] = std::max(at[kPeak], at[kStored]);
    for (size_t end = 0; end < ends_; ++end) at[kPeak] = std::max(at[kPeak], value(kStageQuantities + end));
    return at[kForward] != kAbsent;
}

// Adds to a type of stage what modules take that run positions with labels alone: as in a packed row of these positions
// where rows were measured, else their part of the micro-batch's.
void CostCache::add_labelled(const BySize& by_size, size_t type, const Axis::Cell& cell, const Shape& shape,
                             StageCosts& at) {
    if (!problem_.counts_labels() || type != type_of_.back()) return;
    const std::vector<int64_t>& row = labelled_row(by_size.mode_, shape.labels);
    const size_t sizes = by_size.sizes_->points.size();
    const int64_t positions = std::max<int64_t>(shape.size * shape.input, 1);
    const int64_t labels = std::min(shape.labels, positions);
    const auto value = [&](size_t quantity) -> int64_t {
        if (!row.empty()) return row[quantity];
        const int64_t* values = by_size.labelled_costs_.data() + quantity * sizes;
        const int64_t all = interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
        return static_cast<__int128>(all) * labels / positions;
    };
    for (size_t end = 0; end < ends_; ++end)
        at[kPeak] = std::max(at[kPeak], at[kStored] + value(kStageQuantities + end));
    for (const Quantity quantity : {kForward, kBackward, kStored, kWeight}) at[quantity] += value(quantity);
    at[kPeak] = std::max(at[kPeak], at[kStored]);
}

// [kStageQuantities + ends]; empty where rows were not measured, or none as long.
const std::vector<int64_t>& CostCache::labelled_row(size_t mode, int64_t labels) {
    labels = round_up(std::max<int64_t>(labels, 1), problem_.row_multiple);
    const auto [place, added] = labelled_rows_[mode].try_emplace(labels);
    if (added && packed_.labelled_costs(mode, labels, module_costs_))
        types_[type_of_.back()].append_costs(module_costs_, 1, ends_, place->second);
    return place->second;
}

// As many of so many padded positions as count in the batch's samples, where it is not known which samples they are of.
int64_t CostCache::usual_labels(int64_t positions) const {
    return static_cast<__int128>(positions) * label_sum_ / std::max<int64_t>(input_sum_, 1);
}

// Messages of a virtual stage that holds so many micro-batches of so many positions, beside the inputs that it keeps:
// two inputs and gradients at a time, and what it has sent; about as many as it holds.
int64_t CostCache::message_bytes(size_t v, int64_t held, int64_t inputs, int64_t targets) const {
    const Links& links = problem_.links;
    const auto bytes = [&](const std::vector<uint8_t>& decoder, size_t boundary) {
        return links.held_bytes(inputs + (decoder[boundary] ? targets : 0));
    };
    const bool first = v == 0, last = v + 1 == problem_.modules.size(), train = !problem_.pipeline.forward_only;
    const int64_t input = first ? 0 : bytes(links.decoder_forward, v - 1);
    const int64_t gradient = last || !train ? 0 : bytes(links.decoder_backward, v);
    const int64_t sent = std::max(last ? 0 : bytes(links.decoder_forward, v),
                                  first || !train ? 0 : bytes(links.decoder_backward, v - 1));
    const int64_t sends = train ? held + (held > 1) : kSentAhead;
    return 2 * input + 2 * gradient + sends * sent;
}

Summary CostCache::summarize(const BySize& by_size, int64_t size) {
    const Axis::Cell cell = by_size.sizes_->cell(size);
    const Shape shape{size, by_size.input_, 0, usual_labels(size * by_size.input_)};
    for (size_t type = 0; type < types_.size(); ++type) {
        StageCosts at;
        if (!interpolate_type(by_size, type, cell, at)) return {0, 0, 0, true};
        add_labelled(by_size, type, cell, shape, at);
        const int64_t time = at[kForward] + (problem_.pipeline.forward_only ? 0 : at[kBackward]);
        type_summaries_[type] = {time, at[kStored], at[kPeak] - at[kStored]};
    }
    const size_t stages = problem_.stages(), options = problem_.options();
    int64_t slowest = 0, sum = 0;
    uint32_t fitting = (uint32_t{1} << options) - 1;
    for (size_t stage = 0; stage < stages; ++stage) {
        TypeSummary total{0, 0, 0};
        for (size_t v = stage; v < type_of_.size(); v += stages) {
            const TypeSummary& costs = type_summaries_[type_of_[v]];
            total.time += costs.time;
            total.stored += costs.stored;
            total.above = std::max(total.above, costs.above);
        }
        slowest = std::max(slowest, total.time);
        sum += total.time;
        for (size_t option = 0; option < options; ++option) {
            const int64_t held = problem_.pipeline.forward_only ? 1 : problem_.in_flight[option * stages + stage];
            int64_t messages = 0;
            for (size_t v = stage; v < type_of_.size(); v += stages)
                messages = std::max(messages, message_bytes(v, held, size * by_size.input_, size * by_size.target_));
            if (total.stored * held + total.above + messages > problem_.memory(stage))
                fitting &= ~(uint32_t{1} << option);
        }
    }
    return {slowest, sum - slowest, fitting, true};
}

const CostRow& CostCache::row(size_t mode, const Shape& shape) {
    BySize& by_size = this->by_size(mode, shape.input, shape.target);
    const auto [found, added] = by_size.rows_.try_emplace(shape.size << 41 | shape.labels);
    if (added) compute(by_size, shape, found->second);
    return found->second;
}

void CostCache::compute(const BySize& by_size, const Shape& shape, CostRow& row) {
    if (by_size.stage_costs_.empty() || !by_size.sizes_->covers(shape.size)) {
        by_type_.clear();
    } else {
        const Axis::Cell cell = by_size.sizes_->cell(shape.size);
        by_type_.resize(types_.size() * kStageQuantities);
        for (size_t type = 0; type < types_.size(); ++type) {
            StageCosts at;
            if (!interpolate_type(by_size, type, cell, at)) {
                by_type_.clear();
                break;
            }
            add_labelled(by_size, type, cell, shape, at);
            std::copy_n(at, static_cast<size_t>(kStageQuantities), by_type_.begin() + type * kStageQuantities);
        }
    }
    fill(shape.size * shape.input, shape.size * shape.target, row);
}

int64_t CostCache::uncovered_stage(size_t mode, const Shape& shape) {
    const BySize& by_size = this->by_size(mode, shape.input, shape.target);
    if (by_size.stage_costs_.empty() || !by_size.sizes_->covers(shape.size)) return 0;
    const Axis::Cell cell = by_size.sizes_->cell(shape.size);
    StageCosts at;
    for (size_t v = 0; v < type_of_.size(); ++v)
        if (!interpolate_type(by_size, type_of_[v], cell, at)) return v;
    return -1;
}

PackedRow CostCache::packed(const std::vector<int32_t>& samples) const {
    PackedRow row{samples, 0, 0, 0};
    for (int32_t sample : samples) {
        if (problem_.counts_labels()) row.labels += problem_.labels[sample];
        row.inputs += problem_.input_positions[sample];
        row.targets += problem_.target_positions[sample];
    }
    row.inputs = round_up(row.inputs, problem_.row_multiple);
    row.targets = round_up(row.targets, problem_.row_multiple);
    row.labels = round_up(std::max<int64_t>(row.labels, 1), problem_.row_multiple);
    return row;
}

void CostCache::packed_row(size_t mode, const std::vector<int32_t>& samples, RowSums& sums, CostRow& row) {
    const PackedRow of_samples = packed(samples);
    finish_packed(packed_.module_costs(mode, of_samples, sums, module_costs_), of_samples, sums, row);
}

void CostCache::changed_row(size_t mode, const std::vector<int32_t>& samples, const RowChange& change,
                            const RowSums& before, RowSums& sums, CostRow& row) {
    const PackedRow of_samples = packed(samples);
    const bool covered = packed_.changed_costs(mode, of_samples, change, before, sums, module_costs_);
    finish_packed(covered, of_samples, sums, row);
#ifdef DYNAPIPE_CHECKED
    CostRow anew;
    packed_row(mode, samples, sums_, anew);
    require_same_price(row, anew, samples);
#endif
}

void CostCache::finish_packed(bool covered, const PackedRow& of_samples, RowSums& sums, CostRow& row) {
    by_type_.clear();
    if (covered)
        stage_costs();
    else
        sums.terms.clear();
    fill(of_samples.inputs, of_samples.targets, row);
}

bool CostCache::packed_modules(size_t mode, const std::vector<int32_t>& samples, std::vector<int64_t>& out) {
    return packed_.module_costs(mode, packed(samples), sums_, out);
}

bool CostCache::shares(size_t mode, int32_t sample, int64_t positions, std::vector<Share>& by_type) {
    if (!packed_.share(mode, sample, positions, module_costs_)) return false;
    stage_costs();
    if (by_type_.empty()) return false;
    by_type.clear();
    for (size_t type = 0; type < types_.size(); ++type) {
        const int64_t* at = by_type_.data() + type * kStageQuantities;
        by_type.push_back({at[kForward], at[kBackward], at[kStored]});
    }
    return true;
}

bool append_stage(const StageModules& stage, const std::vector<int64_t>& module_costs, size_t ends,
                  std::vector<int64_t>& by_type) {
    const size_t base = by_type.size();
    stage.append_costs(module_costs, 1, ends, by_type);
    int64_t* const costs = &by_type[base];
    if (costs[kForward] == kAbsent) {
        by_type.resize(base);
        return false;
    }
    costs[kPeak] = std::max(costs[kPeak], costs[kStored]);
    for (size_t end = 0; end < ends; ++end) costs[kPeak] = std::max(costs[kPeak], costs[kStageQuantities + end]);
    by_type.resize(base + kStageQuantities);
    return true;
}

// Costs of every type of stage from `module_costs_`, into `by_type_`; none where one is above the limit.
void CostCache::stage_costs() {
    by_type_.clear();
    for (const StageModules& type : types_) {
        if (append_stage(type, module_costs_, ends_, by_type_)) continue;
        by_type_.clear();
        return;
    }
}

void set_costs(CostRow& row, const std::vector<int64_t>& by_type, const std::vector<size_t>& type_of,
               const Links& links, int64_t inputs, int64_t targets, bool divided) {
    const size_t virtual_stages = type_of.size();
    row.values.assign(kCosts * virtual_stages, 0);
    const auto cost = [&](Cost cost, size_t v) -> int64_t& { return row.values[cost * virtual_stages + v]; };
    for (size_t v = 0; v < virtual_stages; ++v) {
        const int64_t* stage = by_type.data() + type_of[v] * kStageQuantities;
        cost(kForwardNs, v) = stage[kForward];
        cost(kBackwardNs, v) = stage[kBackward];
        cost(kStoredBytes, v) = stage[kStored];
        cost(kPeakBytes, v) = stage[kPeak];
        if (divided) cost(kWeightNs, v) = std::min(stage[kWeight], stage[kBackward]);
    }
    for (size_t v = 0; v + 1 < virtual_stages; ++v) {
        const int64_t forward = inputs + (links.decoder_forward[v] ? targets : 0);
        const int64_t backward = inputs + (links.decoder_backward[v] ? targets : 0);
        cost(kForwardTransferNs, v) = links.transfer_ns(v, forward * links.bytes_per_position);
        cost(kBackwardTransferNs, v + 1) = links.transfer_ns(v, backward * links.bytes_per_position);
        cost(kForwardMessageBytes, v) = links.held_bytes(forward);
        cost(kBackwardMessageBytes, v + 1) = links.held_bytes(backward);
    }
}

// A row from the costs in `by_type_`: [types][kStageQuantities], none where the cost model does not cover the
// micro-batch, and messages of so many positions.
void CostCache::fill(int64_t inputs, int64_t targets, CostRow& row) const {
    row.covered = row.fits = !by_type_.empty();
    if (!row.covered) {
        row.values.assign(kCosts * problem_.modules.size(), 0);
        return;
    }
    set_costs(row, by_type_, type_of_, problem_.links, inputs, targets, problem_.division != Division::kOff);
    row.fits = fits(row);
}

bool CostCache::fits(const CostRow& row) const {
    for (size_t v = 0; v < problem_.modules.size(); ++v)
        if (bytes_alone(problem_.pipeline, row.costs(), v) > problem_.memory(v % problem_.stages())) return false;
    return true;
}

}  // namespace dynapipe
