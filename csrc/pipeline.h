// A pipeline and what one micro-batch costs on it; shared by simulation, list scheduling and search.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace dynapipe {

// When transfers are started, and what a start waits for (plan/transfer_rules.py).
struct TransferRules {
    int64_t receive_ahead = -1;   // passes between a receive's start and its wait; -1 for as many as one receive allows
    bool ordered_starts = false;  // a send's start waits for the channel's previous message

    bool are_plain() const { return receive_ahead < 0 && !ordered_starts; }
};

// Virtual stage v is chunk v / stages of pipeline stage v % stages.
struct PipelineShape {
    int64_t stages, chunks;
    bool forward_only;
    std::vector<int64_t> model_state;  // [stages] bytes
    int64_t memory_limit;
    bool peak_covers_backward;  // peaks count while either pass runs, not the forward alone
    TransferRules transfers = {};

    int64_t virtual_stages() const { return stages * chunks; }
    void check() const;
};

// A pass: (micro-batch * chunks + chunk) * kPassKinds + its kind.
using Pass = int64_t;
enum PassKind : uint8_t { kForwardPass, kBackwardPass, kInputPass, kWeightPass, kPassKinds };
constexpr Pass kNoPass = -1;  // fills up a stage's order where stages run different numbers of passes

// Costs of one micro-batch, each [virtual stages]; see ScheduleProblem in planning/problem.py.
struct PassCosts {
    const int64_t* forward;
    const int64_t* backward;
    const int64_t* stored;
    const int64_t* peak;
    const int64_t* forward_transfer;
    const int64_t* backward_transfer;
    const int64_t* weight;  // the part of `backward` that may run later; 0 where it cannot be divided
    const int64_t* forward_message;   // bytes that leave for the next virtual stage; 0 at the last
    const int64_t* backward_message;  // and for the one before; 0 at the first

    int64_t time(PassKind kind, int64_t v) const {
        switch (kind) {
            case kForwardPass: return forward[v];
            case kBackwardPass: return backward[v];
            case kInputPass: return backward[v] - weight[v];
            default: return weight[v];
        }
    }
};
// Fields of ScheduleProblem, in the order of PassCosts.
constexpr const char* kCostNames[] = {"forward_ns", "backward_ns", "stored_bytes", "peak_bytes",
                                      "forward_transfer_ns", "backward_transfer_ns", "weight_ns",
                                      "forward_message_bytes", "backward_message_bytes"};
constexpr size_t kCosts = std::size(kCostNames);

// A micro-batch's costs from `kCosts` rows of [virtual stages], `apart` values one after another.
inline PassCosts costs_in(const int64_t* rows, size_t apart) {
    const auto row = [&](size_t k) { return rows + k * apart; };
    return {row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7), row(8)};
}

}  // namespace dynapipe
