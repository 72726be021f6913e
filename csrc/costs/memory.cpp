#include "costs/memory.h"

#include <utility>

namespace dynapipe {
namespace {

struct Pool {
    int64_t used = 0, most = 0, largest = 0;

    void set(int64_t now) {
        used = now;
        most = std::max(most, used);
    }
    int64_t bytes() const { return most * largest; }
};

struct Step {
    PassKind kind;
    int64_t row, v;
    bool receives, sends;
};

class Orders {
public:
    Orders(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order)
        : shape_(shape),
          costs_(costs),
          last_(shape.virtual_stages() - 1),
          steps_(shape.stages),
          places_{std::vector<int64_t>(costs.size() * (last_ + 1)), std::vector<int64_t>(costs.size() * (last_ + 1))},
          answers_{std::vector<std::vector<int64_t>>(shape.stages), std::vector<std::vector<int64_t>>(shape.stages)} {
        const int64_t passes = order.size() / shape.stages, chunks = shape.chunks;
        for (size_t i = 0; i < order.size(); ++i) {
            const Pass pass = order[i];
            if (pass == kNoPass) continue;
            const int64_t s = i / passes;
            Step step{static_cast<PassKind>(pass % kPassKinds), pass / (kPassKinds * chunks),
                      pass / kPassKinds % chunks * shape.stages + s, false, false};
            const bool forward = step.kind == kForwardPass;
            if (step.kind != kWeightPass) {
                step.receives = step.v != (forward ? 0 : last_);
                step.sends = step.v != (forward ? last_ : 0);
            }
            if (step.sends) place(forward, step.row, step.v + (forward ? 1 : -1)) = sent_[forward][s]++;
            steps_[s].push_back(step);
        }
        for (int64_t s = 0; s < shape.stages; ++s) answer(s);
    }

    int64_t peak(int64_t s) const;

private:
    int64_t& place(bool forward, int64_t row, int64_t v) { return places_[forward][row * (last_ + 1) + v]; }
    int64_t place(bool forward, int64_t row, int64_t v) const { return places_[forward][row * (last_ + 1) + v]; }
    int64_t receiver(bool forward, int64_t s) const { return (s + (forward ? 1 : shape_.stages - 1)) % shape_.stages; }
    void answer(int64_t s);

    const PipelineShape& shape_;
    const std::vector<PassCosts>& costs_;
    const int64_t last_;
    std::vector<std::vector<Step>> steps_;  // [stages]
    std::vector<int64_t> places_[2];        // of a virtual stage's gradient and input in the channel that brings it
    std::vector<int64_t> sent_[2] = {std::vector<int64_t>(shape_.stages), std::vector<int64_t>(shape_.stages)};
    // [receiver][places] how many messages of the receiver its sender had received before it sent this one
    std::vector<std::vector<int64_t>> answers_[2];
};

void Orders::answer(int64_t s) {
    int64_t waited[2] = {0, 0};
    for (const Step& step : steps_[s]) {
        const bool forward = step.kind == kForwardPass;
        if (step.receives) waited[forward] = std::max(waited[forward], place(forward, step.row, step.v) + 1);
        if (step.sends) answers_[forward][receiver(forward, s)].push_back(waited[!forward]);
    }
}

int64_t Orders::peak(int64_t s) const {
    const bool ahead = shape_.transfers.receive_ahead != 0, train = !shape_.forward_only;
    const bool paced = !train && s + 1 < shape_.stages;  // waits for what it sends onwards
    Pool received[2], sent;                              // gradients and inputs
    int64_t comes[2], waited[2] = {0, 0}, freed[2] = {0, 0}, started[2] = {0, 0}, done[2] = {0, 0};
    for (bool forward : {false, true}) comes[forward] = sent_[forward][receiver(!forward, s)];
    for (const Step& step : steps_[s]) {
        Pool& inputs = received[true];
        inputs.largest = std::max(inputs.largest, input_message(costs_[step.row], step.v));
        received[false].largest = std::max(received[false].largest, gradient_message(shape_, costs_[step.row], step.v));
        sent.largest = std::max(sent.largest, sent_message(shape_, costs_[step.row], step.v));
    }
    const auto receive = [&](bool forward) {
        received[forward].set(std::min(waited[forward] + ahead, comes[forward]) - freed[forward]);
    };
    for (bool forward : {false, true}) receive(forward);
    int64_t held = shape_.model_state[s], kept = 0, peak = held;
    for (const Step& step : steps_[s]) {
        const bool forward = step.kind == kForwardPass, first = step.kind != kWeightPass;
        const PassCosts& cost = costs_[step.row];
        if (step.receives) {
            for (const int64_t at = place(forward, step.row, step.v); waited[forward] <= at;) {
                done[!forward] = answers_[forward][s][waited[forward]++];
                receive(forward);
            }
        }
        if (paced) done[true] = std::max<int64_t>(started[true] - (kSentAhead - 1), 0);
        sent.set(started[0] + started[1] - done[0] - done[1]);
        const int64_t input = train && first ? input_message(cost, step.v) : 0;
        if (!forward) kept -= input;
        const int64_t messages = received[0].bytes() + received[1].bytes() + sent.bytes() - kept;
        const bool above = forward || shape_.peak_covers_backward;
        peak = std::max(peak, held + messages +
                                  (above ? cost(kPeakBytes, step.v) - (forward ? 0 : cost(kStoredBytes, step.v)) : 0));
        if (forward) kept += input;
        if (forward && train) held += cost(kStoredBytes, step.v);
        if (step.kind == kBackwardPass || step.kind == kWeightPass) held -= cost(kStoredBytes, step.v);
        if (first && forward != train) {
            if (step.v > 0) ++freed[true];
            if (train && step.v < last_) ++freed[false];
        }
        if (step.sends) {
            ++started[forward];
            sent.set(sent.used + 1);
        }
    }
    return peak;
}

}  // namespace

std::vector<int64_t> peak_memory(const PipelineShape& shape, const std::vector<PassCosts>& costs,
                                 const std::vector<Pass>& order) {
    const Orders orders(shape, costs, order);
    std::vector<int64_t> peaks;
    for (int64_t s = 0; s < shape.stages; ++s) peaks.push_back(orders.peak(s));
    return peaks;
}

}  // namespace dynapipe
