#include "batches.h"

#include <algorithm>
#include <numeric>

namespace dynapipe {

std::vector<int32_t> BatchMaker::run(int64_t first, int64_t size) {
    std::vector<int32_t> samples(size);
    std::iota(samples.begin(), samples.end(), static_cast<int32_t>(first));
    return samples;
}

const MicroBatch* BatchMaker::make(std::vector<int32_t> samples, size_t mode, bool packed) {
    if (samples.empty()) return nullptr;
    std::sort(samples.begin(), samples.end());
    MicroBatch& batch = made_.emplace_back();
    batch.mode = mode;
    batch.packed = packed;
    if (problem_.is_cut() && !take_pieces(samples, batch)) {
        made_.pop_back();
        return nullptr;
    }
    if (packed) {
        places_.clear();
        for (int32_t place : samples) places_.push_back(order_[place]);
        costs_.packed_row(mode, places_, batch.own);
        if (batch.own.fits) batch.costs = &batch.own.costs;
    } else {
        Shape shape{static_cast<int64_t>(samples.size()), 0, 0};
        for (int32_t place : samples) {
            shape.input = std::max(shape.input, problem_.inputs[order_[place]]);
            shape.target = std::max(shape.target, problem_.targets[order_[place]]);
            if (problem_.counts_labels()) shape.labels += problem_.labels[order_[place]];
        }
        const CostRow& row = costs_.row(mode, shape);
        if (row.fits) batch.costs = &row.costs;
    }
    if (!batch.costs) {
        made_.pop_back();
        return nullptr;
    }
    for (size_t v = 0; v < problem_.modules.size(); ++v) batch.work += batch.costs->forward[v] + batch.costs->backward[v];
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
