// Stages with unequal replicas for a chain of layers: labels over layers × free devices × placement, level by level.
//
//   level 1          level 2                  a label: layers done, devices left, the last stage's placement,
//   [0, i) on p ───► [i, j) on q ───► …       when its first unit arrives, how long gradients drain after it
//
// Labels whose bound is not below the incumbent are discarded; of the others a beam is kept. What the beam drops is
// reported by its least bound, so that the caller knows whether the best plan found is the best that there is.
#pragma once

#include <cstdint>
#include <vector>

namespace dynapipe {

// Every time is in ns. Cumulative arrays have layers + 1 entries a row.
struct OrchestrateProblem {
    int64_t layers = 0, units = 0, most_replicas = 0;
    std::vector<int64_t> forward, backward,
        stored;                           // [most_replicas + 1][layers + 1], cumulative, of a replica's slice
    std::vector<double> boundary_bytes;   // [layers + 1], of a unit, before each layer
    std::vector<double> parameter_bytes;  // [layers + 1], cumulative
    std::vector<int64_t> state_bytes;     // [layers + 1], cumulative
    int64_t memory_limit = 0;
    std::vector<int64_t> replicas;                                      // by placement
    std::vector<double> reduce_latency, reduce_rate;                    // by placement: ns, ns per byte
    std::vector<double> transfer_latency, transfer_rate;                // [placements][placements]
    std::vector<int64_t> first_choice, choice_placement, choice_state;  // by state of the devices, one after another
    std::vector<int64_t> free_devices;                                  // by state

    int64_t placements() const { return replicas.size(); }
    void check() const;
};

struct OrchestratedPlan {
    int64_t bound = 0, estimate = 0;
    std::vector<int64_t> ends, placements;  // of every stage
};

struct Orchestrated {
    std::vector<OrchestratedPlan> plans;  // by estimate, the least first
    int64_t dropped_bound = 0;            // the least of what was dropped
};

// Plans that may take less than `incumbent`, at most `most` of them.
Orchestrated orchestrate(const OrchestrateProblem& problem, int64_t incumbent, int64_t beam, int64_t most);

}  // namespace dynapipe
