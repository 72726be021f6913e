// Replays a fixed order of passes under jitter: a few draws, always the same, in each of which every pass takes up to
// 30% more or less than predicted, by its place in the order, its stage and its direction. For one chunk per stage.
#pragma once

#include <cstdint>
#include <vector>

#include "costs/pipeline.h"
#include "search/random.h"

namespace dynapipe {

constexpr int64_t kJitterDraws = 8;

class JitteredReplay {
public:
    explicit JitteredReplay(const PipelineShape& shape);

    // The sum of the makespans over all draws. `kinds` is as ListScheduler::run fills it, `turned` as it takes it.
    int64_t total(const std::vector<PassCosts>& costs, const std::vector<uint8_t>& kinds,
                  const std::vector<int32_t>& turned);

private:
    struct Draw {
        Random random;
        std::vector<int32_t> factors;  // [micro-batches][stages][forward, backward]; in 1024ths
    };
    struct Stage {
        int64_t free, passes, forwards, backwards, weights;
    };

    int64_t makespan(const std::vector<PassCosts>& costs, const std::vector<uint8_t>& kinds,
                     const std::vector<int32_t>& turned, const std::vector<int32_t>& factors);

    const PipelineShape& shape_;
    std::vector<Draw> draws_;
    std::vector<Stage> stages_;
    std::vector<int64_t> input_ready_, gradient_ready_;  // [stages][micro-batches]
};

}  // namespace dynapipe
