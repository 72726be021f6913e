// What stages hold while they run passes in a given order, messages included (core/memory.py states the rules).
//
// Messages lie in pools of equal buffers: received activations, received gradients, and what is sent. A pool has as
// many buffers as have been in use at once so far, each as large as its largest message. An input that a forward keeps
// is counted with what the forward stores, so its buffer is not counted again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "costs/pipeline.h"

namespace dynapipe {

// Messages that a stage of a forward-only plan sends before it waits for the first (core/lowering.py).
constexpr int64_t kSentAhead = 4;

// The message that a virtual stage receives for a forward pass, and for a backward pass.
inline int64_t input_message(const PassCosts& costs, int64_t v) {
    return v > 0 ? costs(kForwardMessageBytes, v - 1) : 0;
}
inline int64_t gradient_message(const PipelineShape& shape, const PassCosts& costs, int64_t v) {
    return shape.forward_only || v + 1 == shape.virtual_stages() ? 0 : costs(kBackwardMessageBytes, v + 1);
}
inline int64_t sent_message(const PipelineShape& shape, const PassCosts& costs, int64_t v) {
    return std::max(costs(kForwardMessageBytes, v), shape.forward_only ? 0 : costs(kBackwardMessageBytes, v));
}

// The least that a micro-batch needs on a virtual stage.
inline int64_t bytes_alone(const PipelineShape& shape, const PassCosts& costs, int64_t v) {
    return costs(kPeakBytes, v) + input_message(costs, v) + gradient_message(shape, costs, v);
}

// The most that every stage holds at any time, model state included. `order` is [stages][passes], and does not stall.
std::vector<int64_t> peak_memory(const PipelineShape& shape, const std::vector<PassCosts>& costs,
                                 const std::vector<Pass>& order);

}  // namespace dynapipe
