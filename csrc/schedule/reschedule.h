// Known micro-batches under another division of their modules into stages: priced, and list-scheduled within memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "costs/pipeline.h"
#include "costs/problem.h"

namespace dynapipe {

// Micro-batches of one replica, in the order in which they enter the pipeline.
struct KnownMicroBatches {
    std::span<const int64_t> values;  // [micro-batches][modules][kQuantities] what their modules cost
    size_t modules;
    std::span<const int64_t> inputs, targets;  // [micro-batches] padded positions

    size_t count() const { return inputs.size(); }
};

// The least makespan over the policies that are tried first, longer by the share of memory that lacks: where nothing
// fits the memory, `shares` of it are tried in turn. kUnreachable where nothing fits the last one.
//
// O(micro-batches · modules²/stages) to price, O(micro-batches · stages) for each policy and share.
int64_t reschedule(const PipelineShape& shape, const Links& links, const std::vector<StageModules>& stages,
                   const KnownMicroBatches& known, bool divided, const std::vector<double>& shares);

}  // namespace dynapipe
