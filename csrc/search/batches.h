// The micro-batches that a search makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "costs/costs.h"
#include "costs/problem.h"

namespace dynapipe {

// Never changed once made; shared by all solutions that hold it.
struct MicroBatch {
    std::vector<int32_t> samples;  // places in the order, ascending
    Modes modes;
    bool packed;
    int64_t work = 0;                 // time on all stages
    const CostRow* cached = nullptr;  // its costs, where it is padded under one mode
    CostRow own;                      // else its costs
    std::vector<int32_t> pieces;      // those of its samples that are pieces, as places in the problem, ascending

    PassCosts costs() const { return cached ? cached->costs() : own.costs(); }
};

// A solution's micro-batches of one replica, in the order in which they enter the pipeline.
using MicroBatches = std::vector<const MicroBatch*>;

// Makes micro-batches and keeps them.
class BatchMaker {
public:
    // `order` names every sample of the problem once.
    BatchMaker(const Problem& problem, CostCache& costs, const std::vector<int64_t>& order)
        : problem_(problem), costs_(costs), order_(order.begin(), order.end()) {}

    // Of samples given as places in the order; null where it cannot run.
    const MicroBatch* make(std::vector<int32_t> samples, Modes modes, bool packed);
    const MicroBatch* make(std::vector<int32_t> samples, size_t mode, bool packed) {
        return make(std::move(samples), Modes(problem_.modules.size(), mode), packed);
    }

    // The samples [first, first + size).
    static std::vector<int32_t> run(int64_t first, int64_t size);

    size_t samples() const { return order_.size(); }
    int32_t sample(int32_t place) const { return order_[place]; }  // its place in the problem

private:
    bool take_pieces(const std::vector<int32_t>& samples, MicroBatch& batch) const;

    const Problem& problem_;
    CostCache& costs_;
    std::vector<int32_t> order_;
    std::deque<MicroBatch> made_;
    std::vector<int32_t> places_;  // buffers
    CostRow row_;
};

}  // namespace dynapipe
