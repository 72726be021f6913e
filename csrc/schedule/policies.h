// The policies of list scheduling that are tried first, wherever micro-batches are scheduled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "schedule/list_schedule.h"

namespace dynapipe {

constexpr int64_t kGap = 2;  // Policy::least_gap where backward passes may be divided

// Forwards that stages hold beyond what fills the pipeline, and rules: those that win most.
constexpr std::initializer_list<int64_t> kFewExtras{1, 8};
constexpr std::initializer_list<Rule> kFewRules{Rule::kBackwardFirst, Rule::kForwardFirst};

// The depths that fill the pipeline, and `extra` beyond them on all stages but the last; none above `most`.
inline Policy filling_policy(const PipelineShape& shape, int64_t extra, Rule rule, bool divided,
                             int64_t most = kUnreachable) {
    const int64_t by_stage = shape.chunks > 1 ? 2 : 1;
    Policy policy{{}, rule, divided ? kGap : kUndivided};
    for (int64_t s = 0; s + 1 < shape.stages; ++s)
        policy.depth.push_back(std::min(by_stage * (shape.stages - 1 - s) + 1 + extra, most));
    policy.depth.push_back(1);
    return policy;
}

}  // namespace dynapipe
