#include "search/batches.h"

#include <algorithm>
#include <numeric>

namespace dynapipe {

namespace {

// A change puts few samples, or two sorted runs, after one another.
void sort_nearly_sorted(std::vector<int32_t>& values) {
    const auto end = values.end();
    for (auto at = std::is_sorted_until(values.begin(), end); at != end; at = std::is_sorted_until(at, end))
        std::rotate(std::upper_bound(values.begin(), at, *at), at, at + 1);
}

}  // namespace

std::vector<int64_t> work_of_stages(const Problem& problem, const MicroBatches& batches) {
    std::vector<int64_t> work(problem.stages(), 0);
    for (const MicroBatch* batch : batches)
        for (size_t v = 0; v < batch->modes.size(); ++v)
            work[v % work.size()] += batch->costs()(kForwardNs, v) + batch->costs()(kBackwardNs, v);
    return work;
}

std::vector<int32_t> BatchMaker::run(int64_t first, int64_t size) {
    std::vector<int32_t> samples(size);
    std::iota(samples.begin(), samples.end(), static_cast<int32_t>(first));
    return samples;
}

// An empty micro-batch, with the memory of one that was forgotten where there is such.
MicroBatch& BatchMaker::next() {
    if (forgotten_.empty()) forgotten_.push_back(&made_.emplace_back());
    MicroBatch& batch = *forgotten_.back();
    batch.work = 0;
    batch.cached = nullptr;
    batch.pieces.clear();
    for (RowSums& sums : batch.sums) sums.terms.clear();
    return batch;
}

void BatchMaker::forget_since(size_t kept, const std::vector<const MicroBatches*>& but) {
    const auto mark = [&](bool marked) {
        for (const MicroBatches* batches : but)
            for (const MicroBatch* batch : *batches) batch->marked = marked;
    };
    mark(true);
    const auto is_held = [](const MicroBatch* batch) { return batch->marked; };
    const auto gone = std::partition(kept_.begin() + kept, kept_.end(), is_held);
    forgotten_.insert(forgotten_.end(), gone, kept_.end());
    kept_.erase(gone, kept_.end());
    mark(false);
}

const MicroBatch* BatchMaker::make(const std::vector<int32_t>& samples, const Modes& modes, bool packed,
                                   const MicroBatch* like) {
    if (samples.empty() || (!packed && !freedom_.padded)) return nullptr;
    if (!std::all_of(modes.begin(), modes.end(), [&](size_t mode) { return freedom_.allows(mode); })) return nullptr;
    MicroBatch& batch = next();
    batch.packed = packed;
    batch.samples.assign(samples.begin(), samples.end());
    sort_nearly_sorted(batch.samples);
    if (problem_.is_cut() && !take_pieces(batch)) return nullptr;
    Shape shape{static_cast<int64_t>(samples.size()), 0, 0};
    places_.resize(samples.size());
    for (size_t i = 0; i < places_.size(); ++i) places_[i] = order_[batch.samples[i]];
    for (size_t i = 0; i < places_.size() && !packed; ++i) {
        const int32_t sample = places_[i];
        shape.input = std::max(shape.input, problem_.inputs[sample]);
        shape.target = std::max(shape.target, problem_.targets[sample]);
        if (problem_.counts_labels()) shape.labels += problem_.labels[sample];
    }
    if (like && like->packed && packed)
        compare(batch.samples, *like);
    else
        like = nullptr;
    const bool mixed = std::count(modes.begin(), modes.end(), modes[0]) < static_cast<int64_t>(modes.size());
    if (mixed)
        costs_.mix(
            modes, [&](size_t mode) -> const CostRow& { return under(mode, batch, shape, like, row_); }, batch.own);
    const CostRow& row = mixed ? batch.own : under(modes[0], batch, shape, like, batch.own);
    if (!row.fits) return nullptr;
    if (&row != &batch.own) batch.cached = &row;
    batch.modes.assign(modes.begin(), modes.end());
    const PassCosts costs = batch.costs();
    for (size_t v = 0; v < problem_.modules.size(); ++v) batch.work += costs(kForwardNs, v) + costs(kBackwardNs, v);
    kept_.push_back(&batch);
    forgotten_.pop_back();
    return &batch;
}

// Its costs under one mode, those of packed samples in `packed`.
const CostRow& BatchMaker::under(size_t mode, MicroBatch& batch, const Shape& shape, const MicroBatch* like,
                                 CostRow& packed) {
    if (!batch.packed) return costs_.row(mode, shape);
    if (!like) {
        costs_.packed_row(mode, places_, sums_, packed);
        return packed;
    }
    batch.sums.resize(problem_.modes.size());
    like->sums.resize(problem_.modes.size());
    RowSums& before = like->sums[mode];
    if (before.terms.empty()) {
        like_places_.clear();
        for (int32_t place : like->samples) like_places_.push_back(order_[place]);
        costs_.packed_row(mode, like_places_, before, packed);
    }
    if (before.terms.empty())
        costs_.packed_row(mode, places_, batch.sums[mode], packed);
    else
        costs_.changed_row(mode, places_, change_, before, batch.sums[mode], packed);
    return packed;
}

// How samples follow from those of another micro-batch, both ascending.
void BatchMaker::compare(const std::vector<int32_t>& samples, const MicroBatch& like) {
    const size_t count = like.samples.size();
    change_.from.resize(samples.size());
    change_.removed.clear();
    const auto remove = [&](size_t at) {
        change_.removed.push_back({static_cast<int32_t>(at), order_[like.samples[at]]});
    };
    size_t at = 0;
    for (size_t i = 0; i < samples.size(); ++i) {
        while (at < count && like.samples[at] < samples[i]) remove(at++);
        const bool both = at < count && like.samples[at] == samples[i];
        change_.from[i] = both ? static_cast<int32_t>(at++) : -1;
    }
    while (at < count) remove(at++);
}

// False where pieces would be padded, or two of a sample run together.
bool BatchMaker::take_pieces(MicroBatch& batch) const {
    for (int32_t place : batch.samples)
        if (problem_.is_piece(order_[place])) batch.pieces.push_back(order_[place]);
    std::sort(batch.pieces.begin(), batch.pieces.end());
    for (size_t i = 1; i < batch.pieces.size(); ++i)
        if (problem_.chains[batch.pieces[i]] == problem_.chains[batch.pieces[i - 1]]) return false;
    return batch.pieces.empty() || batch.packed;
}

}  // namespace dynapipe
