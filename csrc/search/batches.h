// The micro-batches that a search makes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "costs/costs.h"
#include "costs/problem.h"

namespace dynapipe {

// Never changed while a solution holds it; shared by all that do.
struct MicroBatch {
    std::vector<int32_t> samples;  // places in the order, ascending
    Modes modes;
    bool packed = false;
    int64_t work = 0;                   // time on all stages
    const CostRow* cached = nullptr;    // its costs, where it is padded under one mode
    CostRow own;                        // else its costs
    std::vector<int32_t> pieces;        // those of its samples that are pieces, as places in the problem, ascending
    mutable std::vector<RowSums> sums;  // [modes] where it is packed, those that others like it asked for
    mutable bool marked = false;        // while micro-batches are forgotten that no solution holds

    PassCosts costs() const { return cached ? cached->costs() : own.costs(); }
};

// A solution's micro-batches of one replica, in the order in which they enter the pipeline.
using MicroBatches = std::vector<const MicroBatch*>;

// Time of a replica's passes on each stage.
std::vector<int64_t> work_of_stages(const Problem& problem, const MicroBatches& batches);

// What may be chosen for a micro-batch.
struct Freedom {
    std::vector<size_t> modes = {};  // all where none is named
    bool padded = true;

    bool allows(size_t mode) const {
        return modes.empty() || std::find(modes.begin(), modes.end(), mode) != modes.end();
    }
};

// Makes micro-batches and keeps them.
class BatchMaker {
public:
    // `order` names every sample of the problem once.
    BatchMaker(const Problem& problem, CostCache& costs, const std::vector<int64_t>& order)
        : problem_(problem), costs_(costs), order_(order.begin(), order.end()) {}

    // Of samples given as places in the order; null where it cannot run. One `like` it, which has about the same
    // samples, makes that faster.
    const MicroBatch* make(const std::vector<int32_t>& samples, const Modes& modes, bool packed,
                           const MicroBatch* like = nullptr);
    const MicroBatch* make(const std::vector<int32_t>& samples, size_t mode, bool packed) {
        uniform_.assign(problem_.modules.size(), mode);
        return make(samples, uniform_, packed);
    }

    // From here on no other is made.
    void restrict_to(Freedom freedom) { freedom_ = std::move(freedom); }
    const Freedom& freedom() const { return freedom_; }

    // So many were made and are kept; the memory of those that are forgotten is used again.
    size_t kept() const { return kept_.size(); }
    void forget_since(size_t kept) { forget_since(kept, {}); }
    // Of those that were made since, all but these.
    void forget_since(size_t kept, const std::vector<const MicroBatches*>& but);

    // The samples [first, first + size).
    static std::vector<int32_t> run(int64_t first, int64_t size);

    size_t samples() const { return order_.size(); }
    int32_t sample(int32_t place) const { return order_[place]; }  // its place in the problem

private:
    MicroBatch& next();
    bool take_pieces(MicroBatch& batch) const;
    const CostRow& under(size_t mode, MicroBatch& batch, const Shape& shape, const MicroBatch* like, CostRow& packed);
    void compare(const std::vector<int32_t>& samples, const MicroBatch& like);

    const Problem& problem_;
    CostCache& costs_;
    std::vector<int32_t> order_;
    Freedom freedom_;
    std::deque<MicroBatch> made_;
    std::vector<MicroBatch*> kept_, forgotten_;  // of those; the last forgotten one is the next to be made
    std::vector<int32_t> places_, like_places_;  // buffers: samples as places in the problem
    RowChange change_;
    RowSums sums_;
    Modes uniform_;
    CostRow row_;
};

}  // namespace dynapipe
