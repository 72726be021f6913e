// Local search over cuts, recompute modes, replicas, order and schedule, on list scheduling's makespan.
// The rules are told in planning/search.py.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "simulate.h"
#include "tables.h"

namespace dynapipe {

// What crosses the boundary v → v + 1 and how long it takes: [virtual stages - 1] each.
struct Links {
    int64_t bytes_per_position;            // of one hidden state
    std::vector<uint8_t> decoder_forward;  // whether activations hold the decoder's state
    std::vector<uint8_t> decoder_backward;
    std::vector<double> latency_ns, gbps;  // [ways][virtual stages - 1]: a message goes the fastest way
};

struct SearchProblem {
    std::vector<int64_t> inputs, targets;  // padded lengths in the order that is cut
    std::vector<Grid> modes;
    std::vector<StageLayers> layers;
    PipelineShape shape;
    Links links;
    int64_t replicas;

    void check() const;
};

// A micro-batch: samples [first, first + size) of the order.
struct MicroBatch {
    int64_t first, size, mode;
    const PassCosts* costs = nullptr;  // null until looked up
};

// One replica's micro-batches in the order in which they enter the pipeline, and how its passes are chosen.
struct ReplicaState {
    std::vector<MicroBatch> micro_batches;
    Policy policy;
    int64_t makespan = 0;
};

struct Found {
    std::vector<ReplicaState> replicas;          // empty where no cut fits
    std::vector<std::vector<uint8_t>> forwards;  // per replica, see ListScheduler::run
};

Found search(const SearchProblem& problem, const std::vector<std::vector<MicroBatch>>& cuts, int64_t evaluations, uint64_t seed);

}  // namespace dynapipe
