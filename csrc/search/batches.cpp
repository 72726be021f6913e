#include "search/batches.h"

#include <algorithm>
#include <numeric>

namespace dynapipe {

std::vector<int32_t> BatchMaker::run(int64_t first, int64_t size) {
    std::vector<int32_t> samples(size);
    std::iota(samples.begin(), samples.end(), static_cast<int32_t>(first));
    return samples;
}

const MicroBatch* BatchMaker::make(std::vector<int32_t> samples, Modes modes, bool packed) {
    if (samples.empty()) return nullptr;
    std::sort(samples.begin(), samples.end());
    MicroBatch& batch = made_.emplace_back();
    batch.packed = packed;
    if (problem_.is_cut() && !take_pieces(samples, batch)) {
        made_.pop_back();
        return nullptr;
    }
    Shape shape{static_cast<int64_t>(samples.size()), 0, 0};
    places_.clear();
    for (int32_t place : samples) {
        const int32_t sample = order_[place];
        places_.push_back(sample);
        shape.input = std::max(shape.input, problem_.inputs[sample]);
        shape.target = std::max(shape.target, problem_.targets[sample]);
        if (problem_.counts_labels()) shape.labels += problem_.labels[sample];
    }
    const auto under = [&](size_t mode, CostRow& packed_row) -> const CostRow& {
        if (!packed) return costs_.row(mode, shape);
        costs_.packed_row(mode, places_, packed_row);
        return packed_row;
    };
    const bool mixed = std::count(modes.begin(), modes.end(), modes[0]) < static_cast<int64_t>(modes.size());
    if (mixed) costs_.mix(modes, [&](size_t mode) -> const CostRow& { return under(mode, row_); }, batch.own);
    const CostRow& row = mixed ? batch.own : under(modes[0], batch.own);
    if (!row.fits) {
        made_.pop_back();
        return nullptr;
    }
    if (&row != &batch.own) batch.cached = &row;
    batch.modes = std::move(modes);
    const PassCosts costs = batch.costs();
    for (size_t v = 0; v < problem_.modules.size(); ++v) batch.work += costs(kForwardNs, v) + costs(kBackwardNs, v);
    batch.samples = std::move(samples);
    return &batch;
}

// False where pieces would be padded, or two of a sample run together.
bool BatchMaker::take_pieces(const std::vector<int32_t>& samples, MicroBatch& batch) const {
    for (int32_t place : samples)
        if (problem_.is_piece(order_[place])) batch.pieces.push_back(order_[place]);
    std::sort(batch.pieces.begin(), batch.pieces.end());
    for (size_t i = 1; i < batch.pieces.size(); ++i)
        if (problem_.chains[batch.pieces[i]] == problem_.chains[batch.pieces[i - 1]]) return false;
    return batch.pieces.empty() || batch.packed;
}

}  // namespace dynapipe
