// How a fixed order of passes fares when passes take other times than predicted. The Python twin is planning/noise.py.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"
#include "simulate.h"

namespace dynapipe {

constexpr int64_t kNoiseDraws = 8;

class NoisyReplay {
public:
    explicit NoisyReplay(const PipelineShape& shape);

    // The sum of the makespans over all draws. `forwards` is as ListScheduler::run fills it.
    int64_t total(const std::vector<const PassCosts*>& costs, const std::vector<uint8_t>& forwards);

private:
    struct Draw {
        Random random;
        std::vector<int32_t> factors;  // [micro-batches][stages][forward, backward]; in 1024ths
    };
    struct Rank {
        int64_t free, forwards, backwards;
    };

    int64_t makespan(const std::vector<const PassCosts*>& costs, const std::vector<uint8_t>& forwards,
                     const std::vector<int32_t>& factors);

    const PipelineShape& shape_;
    std::vector<Draw> draws_;
    std::vector<Rank> ranks_;
    std::vector<int64_t> input_ready_, gradient_ready_;  // [stages][micro-batches]
};

}  // namespace dynapipe
