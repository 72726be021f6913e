// The one cache of costs: what micro-batches cost, by recompute mode and shape, computed when first asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "checks.h"
#include "costs/packed.h"
#include "costs/problem.h"
#include "costs/tables.h"

namespace dynapipe {

using Modes = std::vector<uint8_t>;  // [virtual stages] recompute mode of a micro-batch on each

// The padded shape of a micro-batch.
struct Shape {
    int64_t size, input, target;
    int64_t labels = 0;  // positions that count, where not all do
};

// A micro-batch in the terms of the partition.
struct Summary {
    int64_t time;      // forward and backward on its slowest stage
    int64_t warmup;    // forward and backward on all other stages: the pipeline's warm-up and drain around it
    uint32_t options;  // of micro-batches in flight under which it fits
    bool known;
};

// A micro-batch on every virtual stage.
struct CostRow {
    std::vector<int64_t> values;  // [kCosts][virtual stages]
    bool covered = false;         // by the cost model
    bool fits = false;            // covered, and its peaks fit beside the model state

    PassCosts costs() const { return {values.data(), values.size() / kCosts}; }
};

// Sets a row's costs from those of every virtual stage: stage v's are the kStageQuantities of `by_type` from type_of[v]
// on, and its messages are of so many positions. Passes that are not `divided` have no second halves.
void set_costs(CostRow& row, const std::vector<int64_t>& by_type, const std::vector<size_t>& type_of,
               const Links& links, int64_t inputs, int64_t targets, bool divided);

// Appends a stage's kStageQuantities, given those of modules at one size, [rows]; false where one is above the limit.
bool append_stage(const StageModules& stage, const std::vector<int64_t>& module_costs, size_t ends,
                  std::vector<int64_t>& by_type);

class CostCache {
public:
    // Micro-batches of one pair of padded lengths under one recompute mode, by size.
    class BySize {
    public:
        // Larger sizes were not measured, or did not fit.
        int64_t largest() const { return summaries_.size(); }

    private:
        friend class CostCache;
        size_t mode_;
        const Axis* sizes_;
        int64_t input_, target_;
        std::vector<int64_t> stage_costs_;  // [types][kStageQuantities + ends_][sizes of the grid]
        // Of the last type: what it does with positions with labels alone, if all have one.
        std::vector<int64_t> labelled_costs_;
        std::vector<Summary> summaries_;
        std::unordered_map<int64_t, CostRow> rows_;  // by size and labels
    };

    explicit CostCache(const Problem& problem);

    BySize& by_size(size_t mode, int64_t input, int64_t target) {
        std::unique_ptr<BySize>& slot = by_lengths_[mode][input << 21 | target];
        if (!slot) slot = make_by_size(mode, input, target);
        return *slot;
    }

    // For sizes from 1 to `largest()`.
    const Summary& summary(BySize& by_size, int64_t size) {
        Summary& slot = by_size.summaries_[size - 1];
        if (!slot.known) slot = summarize(by_size, size);
        return slot;
    }

    // Of a padded micro-batch. What is returned lives as long as this object.
    const CostRow& row(size_t mode, const Shape& shape);

    // The first virtual stage on which a padded micro-batch has no costs, or -1.
    int64_t uncovered_stage(size_t mode, const Shape& shape);

    // Of samples packed into one row, as places in the problem; every set is computed anew. Fills `sums`, which are
    // none where the cost model does not cover the row.
    void packed_row(size_t mode, const std::vector<int32_t>& samples, RowSums& sums, CostRow& row);
    // The same of a row that follows from another one, by that one's sums.
    void changed_row(size_t mode, const std::vector<int32_t>& samples, const RowChange& change, const RowSums& before,
                     RowSums& sums, CostRow& row);

    // Costs of the modules of such a row, by kind and quantity: [rows]; false where the cost model does not cover it.
    bool packed_modules(size_t mode, const std::vector<int32_t>& samples, std::vector<int64_t>& out);

    // Takes every virtual stage's costs from the row under its mode, which `under` gives.
    template <typename Under>
    void mix(const Modes& modes, Under under, CostRow& row) const {
        const size_t stages = modes.size();
        row.values.assign(kCosts * stages, 0);
        row.covered = true;
        for (size_t mode = 0; mode < problem_.modes.size(); ++mode) {
            if (std::find(modes.begin(), modes.end(), mode) == modes.end()) continue;
            const CostRow& under_mode = under(mode);
            row.covered &= under_mode.covered;
            for (size_t at = 0; at < row.values.size(); at += stages)
                for (size_t v = 0; v < stages; ++v)
                    if (modes[v] == mode) row.values[at + v] = under_mode.values[at + v];
        }
        row.fits = row.covered && fits(row);
    }

    // Of one sample in a row of so many positions like it, on every type of stage.
    struct Share {
        int64_t forward, backward, stored;
    };
    bool shares(size_t mode, int32_t sample, int64_t positions, std::vector<Share>& by_type);
    // Stages of one type hold as many modules of every kind, in the same order: [virtual stages].
    const std::vector<size_t>& type_of() const { return type_of_; }
    size_t types() const { return types_.size(); }

private:
    // Costs of one type of stage at a size: [kStageQuantities].
    using StageCosts = int64_t[kStageQuantities];

    std::unique_ptr<BySize> make_by_size(size_t mode, int64_t input, int64_t target);
    Summary summarize(const BySize& by_size, int64_t size);
    int64_t usual_labels(int64_t positions) const;
    int64_t message_bytes(size_t v, int64_t held, int64_t inputs, int64_t targets) const;
    void compute(const BySize& by_size, const Shape& shape, CostRow& row);
    PackedRow packed(const std::vector<int32_t>& samples) const;
    void finish_packed(bool covered, const PackedRow& of_samples, RowSums& sums, CostRow& row);
    void stage_costs();
    void fill(int64_t inputs, int64_t targets, CostRow& row) const;
    bool fits(const CostRow& row) const;
    bool interpolate_type(const BySize& by_size, size_t type, const Axis::Cell& cell, StageCosts& at) const;
    void add_labelled(const BySize& by_size, size_t type, const Axis::Cell& cell, const Shape& shape, StageCosts& at);
    const std::vector<int64_t>& labelled_row(size_t mode, int64_t labels);

    const Problem& problem_;
    std::vector<StageModules> types_;                                               // the distinct stages
    std::vector<size_t> type_of_;                                                   // [virtual stages]
    std::vector<std::unordered_map<int64_t, std::unique_ptr<BySize>>> by_lengths_;  // [modes]
    std::vector<std::unordered_map<int64_t, std::vector<int64_t>>> labelled_rows_;  // [modes] by labels
    struct TypeSummary {
        int64_t time, stored, above;
    };
    std::vector<TypeSummary> type_summaries_;  // [types], of the micro-batch being summarized
    size_t ends_ = 0;                          // that a type has at most
    int64_t label_sum_, input_sum_;            // of all samples
    PackedCosts packed_;
    std::vector<int64_t> module_costs_, by_type_;  // buffers: [rows], [types][kStageQuantities]
    RowSums sums_;
};

}  // namespace dynapipe
