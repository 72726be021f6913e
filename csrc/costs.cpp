#include "costs.h"

#include <algorithm>

#include "checks.h"

namespace dynapipe {

Candidate Costs::compute(const Profile& profile, int64_t size) {
    const Axis::Cell cell = profile.cell(size);
    const size_t knots = profile.knots();
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
        const int64_t* rows = profile.rows() + kind * kStageRows * knots;
        int64_t at[kStageRows];
        for (int row = 0; row < kStageRows; ++row) {
            const int64_t* values = rows + row * knots;
            at[row] = interpolate(values[cell.low], values[cell.high], cell.part, cell.width);
        }
        if (at[kForward] == kAbsent) return {0, 0, 0, true};
        const int64_t time = at[kForward] + (problem_.forward_only ? 0 : at[kBackward]);
        costs_of_kind_[kind] = {time, at[kStored], peak_of(at) - at[kStored]};
    }
    const size_t ranks = problem_.ranks(), options = problem_.options();
    int64_t slowest = 0, sum = 0;
    uint32_t fitting = (uint32_t{1} << options) - 1;
    for (size_t rank = 0; rank < ranks; ++rank) {
        KindCosts rank_costs{0, 0, 0};
        for (size_t stage = rank; stage < kind_of_.size(); stage += ranks) {
            const KindCosts& costs = costs_of_kind_[kind_of_[stage]];
            rank_costs.time += costs.time;
            rank_costs.stored += costs.stored;
            rank_costs.above = std::max(rank_costs.above, costs.above);
        }
        slowest = std::max(slowest, rank_costs.time);
        sum += rank_costs.time;
        for (size_t option = 0; option < options; ++option) {
            const int64_t held = problem_.forward_only ? 1 : problem_.in_flight[option * ranks + rank];
            if (rank_costs.stored * held + rank_costs.above > problem_.memory[rank])
                fitting &= ~(uint32_t{1} << option);
        }
    }
    return {slowest, sum - slowest, fitting, true};
}

}  // namespace dynapipe
