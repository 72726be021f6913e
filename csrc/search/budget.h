// How many schedules a search of packed rows tries by default, so that planning takes about the same time whatever the
// batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "costs/problem.h"

namespace dynapipe {

struct Share {
    int64_t parts, of;
};

// Rows of a replica, on chunks, that a search schedules on all stages, and evaluations at most.
struct Budget {
    int64_t rows, most;

    int64_t evaluations(int64_t on_chunks) const { return std::min(rows / on_chunks, most); }
};
constexpr Budget kBudget{245'000, 9500};
constexpr Budget kBudgetOfTwo{200'000, 7900};  // where stages must be even in two kinds of layers, and half more
// Where a replica has few rows, no change of one sample leads from good ones to better: more starts compete for longer.
constexpr Budget kBudgetOfFew{400'000, 40'000};
constexpr int64_t kFewRows = 8;
constexpr int64_t kFewStages = 4;
constexpr int64_t kMoreOfFewStages = 2;    // times as many evaluations, with one chunk: each schedules fewer passes
constexpr int64_t kLargeBudget = 500'000;  // that it schedules at most, so that large batches take no longer
constexpr int64_t kLeast = 2500;
constexpr Share kMoreOfTwo{3, 2};

inline int64_t default_evaluations(const Problem& problem, int64_t rows) {
    const Budget& budget = rows <= kFewRows ? kBudgetOfFew : problem.even_two ? kBudgetOfTwo : kBudget;
    const int64_t on_chunks = rows * problem.chunks();
    const int64_t more = problem.stages() <= kFewStages && problem.chunks() == 1 ? kMoreOfFewStages : 1;
    const int64_t evaluations =
        std::min(std::max(budget.evaluations(on_chunks), kLeast) * more, kLargeBudget / on_chunks);
    return problem.even_two ? evaluations * kMoreOfTwo.parts / kMoreOfTwo.of : evaluations;
}

}  // namespace dynapipe
