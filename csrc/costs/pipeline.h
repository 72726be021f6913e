// A pipeline and what one micro-batch costs on it; shared by simulation, list scheduling and search.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace dynapipe {

// When transfers are started, and what a start waits for (core/network.py).
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

// What a micro-batch costs on a virtual stage; see ScheduleProblem in core/problem.py.
enum Cost : uint8_t {
    kForwardNs,
    kBackwardNs,
    kStoredBytes,
    kPeakBytes,
    kForwardTransferNs,
    kBackwardTransferNs,
    kWeightNs,              // the part of the backward that may run later; 0 where it cannot be divided
    kForwardMessageBytes,   // leave for the next virtual stage; 0 at the last
    kBackwardMessageBytes,  // leave for the one before; 0 at the first
    kCosts
};
// Fields of ScheduleProblem, by cost.
constexpr const char* kCostNames[] = {"forward_ns", "backward_ns",           "stored_bytes",
                                      "peak_bytes", "forward_transfer_ns",   "backward_transfer_ns",
                                      "weight_ns",  "forward_message_bytes", "backward_message_bytes"};
static_assert(std::size(kCostNames) == kCosts);

// Costs of one micro-batch, [kCosts][virtual stages], which lie elsewhere: equal where they are in one place.
class PassCosts {
public:
    PassCosts(const int64_t* values, size_t virtual_stages) : values_(values), virtual_stages_(virtual_stages) {}

    int64_t operator()(Cost cost, int64_t v) const { return of(cost)[v]; }
    const int64_t* of(Cost cost) const { return values_ + cost * virtual_stages_; }
    int64_t time(PassKind kind, int64_t v) const {
        switch (kind) {
            case kForwardPass:
                return (*this)(kForwardNs, v);
            case kBackwardPass:
                return (*this)(kBackwardNs, v);
            case kInputPass:
                return (*this)(kBackwardNs, v) - (*this)(kWeightNs, v);
            default:
                return (*this)(kWeightNs, v);
        }
    }
    bool operator==(const PassCosts& other) const = default;

private:
    const int64_t* values_;
    size_t virtual_stages_;
};

}  // namespace dynapipe
