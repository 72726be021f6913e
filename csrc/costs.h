// What micro-batches of neighbouring samples cost, looked up by shape (planning/intervals.py, its twin).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "checks.h"
#include "cut.h"
#include "tables.h"

namespace dynapipe {

// A micro-batch that may be made: what it costs, and the options of micro-batches in flight under which it fits.
struct Candidate {
    int64_t time, fill;
    uint32_t options;
    bool known;
};

// Costs of micro-batches of one padded length under one recompute mode, by size, found when first asked for.
class Profile {
public:
    Profile(const CutProblem& problem, const Grid& grid, const std::vector<StageLayers>& kinds, int64_t input,
            int64_t target)
        : sizes_(&grid.sizes) {
        const std::vector<int64_t> knots = grid.knots(input, target);
        size_t present = sizes_->points.size();
        while (present > 0 && knots[present - 1] == kAbsent) --present;
        if (present == 0) return;
        by_size_.resize(std::min<int64_t>(problem.inputs.size(), sizes_->points[present - 1]));
        for (const StageLayers& kind : kinds) append_stage_knots(knots, sizes_->points.size(), kind, rows_);
    }

    // Sizes above this were not measured, or did not fit.
    int64_t largest() const { return by_size_.size(); }

    const int64_t* rows() const { return rows_.data(); }

    Candidate& at(int64_t size) { return by_size_[size - 1]; }

    Axis::Cell cell(int64_t size) const { return sizes_->cell(size); }

    size_t knots() const { return sizes_->points.size(); }

private:
    const Axis* sizes_;
    std::vector<int64_t> rows_;  // [kinds][kStageRows][sizes]
    std::vector<Candidate> by_size_;
};

// Looks up what micro-batches cost.
class Costs {
public:
    explicit Costs(const CutProblem& problem) : problem_(problem), profiles_(problem.modes.size()) {
        for (const StageLayers& stage : problem.layers) {
            const auto found = std::find(kinds_.begin(), kinds_.end(), stage);
            kind_of_.push_back(found - kinds_.begin());
            if (found == kinds_.end()) kinds_.push_back(stage);
        }
        costs_of_kind_.resize(kinds_.size());
    }

    Profile& profile(size_t mode, int64_t input, int64_t target) {
        std::unique_ptr<Profile>& slot = profiles_[mode][input << 21 | target];
        if (!slot) slot = std::make_unique<Profile>(problem_, problem_.modes[mode], kinds_, input, target);
        return *slot;
    }

    const Candidate& candidate(Profile& profile, int64_t size) {
        Candidate& slot = profile.at(size);
        if (!slot.known) slot = compute(profile, size);
        return slot;
    }

private:
    struct KindCosts {
        int64_t time, stored, above;
    };

    Candidate compute(const Profile& profile, int64_t size);

    const CutProblem& problem_;
    std::vector<StageLayers> kinds_;  // distinct stages
    std::vector<size_t> kind_of_;     // [virtual stages]
    std::vector<KindCosts> costs_of_kind_;
    std::vector<std::unordered_map<int64_t, std::unique_ptr<Profile>>> profiles_;  // [modes]{lengths}
};

}  // namespace dynapipe
