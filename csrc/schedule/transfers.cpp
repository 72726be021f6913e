#include "schedule/transfers.h"

#include <algorithm>
#include <utility>

namespace dynapipe {
namespace {

constexpr int64_t kUnknown = -1;

// One message of a channel: a stage's activations to the next stage, or its gradients to the one before. Both ends
// take a channel's messages in the order in which they are sent.
struct Message {
    int64_t duration;
    int64_t wait;               // the receiver's pass before which it waits for the message
    int64_t sent = kUnknown;    // when its send is started
    int64_t posted = kUnknown;  // when its receive is

    bool started() const { return sent != kUnknown && posted != kUnknown; }
    int64_t arrival() const { return std::max(sent, posted) + duration; }
};

class Replay {
public:
    Replay(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order);
    Simulation run();

private:
    struct Stage {
        int64_t pass = 0, free = 0;
        int64_t waited[2] = {0, 0};  // messages received, by channel
        bool sending = false;        // the pass has run, and its message is not under way
    };

    bool ended(int64_t s) const {
        return stages_[s].pass == passes_ || order_[s * passes_ + stages_[s].pass] == kNoPass;
    }
    static PassKind kind(Pass pass) { return static_cast<PassKind>(pass % kPassKinds); }
    static bool backward(Pass pass) { return kind(pass) != kForwardPass; }
    int64_t row(Pass pass) const { return pass / (kPassKinds * shape_.chunks); }
    int64_t virtual_stage(Pass pass, int64_t s) const { return pass / kPassKinds % shape_.chunks * shape_.stages + s; }
    // Channel 2 * s carries the activations of stage s, 2 * s + 1 its gradients.
    int64_t arriving(int64_t s, bool gradients) const {
        return gradients ? 2 * ((s + 1) % shape_.stages) + 1 : 2 * ((s + shape_.stages - 1) % shape_.stages);
    }
    void number();
    bool advance(int64_t s);
    bool receive(int64_t s, int64_t& ready);
    void post(int64_t s, int64_t now);
    void compute(int64_t s, int64_t start);
    bool send(int64_t s);

    const PipelineShape& shape_;
    const std::vector<PassCosts>& costs_;
    const std::vector<Pass>& order_;
    const int64_t passes_, last_;
    std::vector<Stage> stages_;
    std::vector<std::vector<Message>> channels_;
    std::vector<int64_t> sends_;  // [stages][passes] number of the message that a pass sends, or kUnknown
    std::vector<PassKind> done_;  // the last pass of each micro-batch on each virtual stage; kPassKinds before any
    bool moved_ = true;
    Simulation run_;
};

Replay::Replay(const PipelineShape& shape, const std::vector<PassCosts>& costs, const std::vector<Pass>& order)
    : shape_(shape),
      costs_(costs),
      order_(order),
      passes_(order.size() / shape.stages),
      last_(shape.virtual_stages() - 1),
      stages_(shape.stages),
      channels_(2 * shape.stages),
      sends_(order.size(), kUnknown),
      done_(costs.size() * shape.virtual_stages(), kPassKinds) {
    run_.start.assign(order.size(), 0);
    run_.end.assign(order.size(), 0);
    number();
}

// Numbers the messages of every channel, and finds where each is waited for: before the pass that needs it, or before
// an earlier one that needs a later message.
void Replay::number() {
    const int64_t width = last_ + 1;
    std::vector<int64_t> place(2 * costs_.size() * width, passes_);  // of each pass in its stage's order
    for (int64_t s = 0; s < shape_.stages; ++s) {
        for (int64_t i = 0; i < passes_; ++i) {
            const Pass pass = order_[s * passes_ + i];
            if (pass == kNoPass || kind(pass) == kWeightPass) continue;
            place[2 * (row(pass) * width + virtual_stage(pass, s)) + backward(pass)] = i;
        }
    }
    for (int64_t s = 0; s < shape_.stages; ++s) {
        for (int64_t i = 0; i < passes_; ++i) {
            const Pass pass = order_[s * passes_ + i];
            if (pass == kNoPass || kind(pass) == kWeightPass) continue;
            const bool gradients = backward(pass);
            const int64_t row = this->row(pass), v = virtual_stage(pass, s);
            if (gradients ? v == 0 : v == last_) continue;
            std::vector<Message>& channel = channels_[2 * s + gradients];
            sends_[s * passes_ + i] = channel.size();
            const int64_t* durations = costs_[row].of(gradients ? kBackwardTransferNs : kForwardTransferNs);
            channel.push_back({durations[v], place[2 * (row * width + (gradients ? v - 1 : v + 1)) + gradients]});
        }
    }
    for (std::vector<Message>& channel : channels_)
        for (size_t n = channel.size(); n-- > 1;) channel[n - 1].wait = std::min(channel[n - 1].wait, channel[n].wait);
}

// Waits for the messages of the pass that comes next; false where one has not been sent.
bool Replay::receive(int64_t s, int64_t& ready) {
    Stage& stage = stages_[s];
    for (bool gradients : {false, true}) {
        std::vector<Message>& channel = channels_[arriving(s, gradients)];
        int64_t& n = stage.waited[gradients];
        for (; n < static_cast<int64_t>(channel.size()) && channel[n].wait <= stage.pass; ++n) {
            Message& message = channel[n];
            if (message.posted == kUnknown) {
                message.posted = ready;
                moved_ = true;
            }
            if (message.sent == kUnknown) return false;
            ready = std::max(ready, message.arrival());
            moved_ = true;
        }
    }
    return true;
}

// Posts the receives that come before the stage's pass: at most one ahead on a channel.
void Replay::post(int64_t s, int64_t now) {
    const Stage& stage = stages_[s];
    const int64_t ahead = shape_.transfers.receive_ahead;
    for (bool gradients : {false, true}) {
        std::vector<Message>& channel = channels_[arriving(s, gradients)];
        const int64_t n = stage.waited[gradients];
        if (n == static_cast<int64_t>(channel.size()) || channel[n].posted != kUnknown) continue;
        if (ahead < 0 || channel[n].wait - ahead <= stage.pass) channel[n].posted = now;
    }
}

void Replay::compute(int64_t s, int64_t start) {
    Stage& stage = stages_[s];
    const int64_t step = s * passes_ + stage.pass;
    const PassKind kind = this->kind(order_[step]);
    const int64_t row = this->row(order_[step]), v = virtual_stage(order_[step], s);
    const PassCosts& cost = costs_[row];
    run_.start[step] = start;
    run_.end[step] = stage.free = start + cost.time(kind, v);
    run_.makespan = std::max(run_.makespan, stage.free);
    done_[row * (last_ + 1) + v] = kind;
    stage.sending = moved_ = true;
}

// Starts the pass's send; false where the channel's previous message must be through first, and is not.
bool Replay::send(int64_t s) {
    Stage& stage = stages_[s];
    const int64_t n = sends_[s * passes_ + stage.pass];
    if (n != kUnknown) {
        std::vector<Message>& channel = channels_[2 * s + backward(order_[s * passes_ + stage.pass])];
        if (shape_.transfers.ordered_starts && n > 0) {
            if (!channel[n - 1].started()) return false;
            stage.free = std::max(stage.free, channel[n - 1].arrival());
        }
        channel[n].sent = stage.free;
    }
    stage.sending = false;
    ++stage.pass;
    return moved_ = true;
}

// Takes the stage's next pass as far as it goes; whether it is through.
bool Replay::advance(int64_t s) {
    Stage& stage = stages_[s];
    if (!stage.sending) {
        const Pass pass = order_[s * passes_ + stage.pass];
        const PassKind before = done_[row(pass) * (last_ + 1) + virtual_stage(pass, s)];
        int64_t ready = stage.free;
        if (!receive(s, ready)) {
            stage.free = ready;  // what has arrived is waited for; the next receive is posted then
            return false;
        }
        if (backward(pass) && before != (kind(pass) == kWeightPass ? kInputPass : kForwardPass)) return false;
        post(s, ready);
        compute(s, ready);
    }
    return send(s);
}

Simulation Replay::run() {
    if (shape_.transfers.receive_ahead < 0)
        for (std::vector<Message>& channel : channels_)
            if (!channel.empty()) channel[0].posted = 0;
    while (std::exchange(moved_, false))
        for (int64_t s = 0; s < shape_.stages; ++s)
            while (!ended(s) && advance(s)) {
            }
    for (int64_t s = 0; s < shape_.stages; ++s) {
        run_.position.push_back(stages_[s].pass);
        run_.stalled |= !ended(s);
    }
    return std::move(run_);
}

}  // namespace

Simulation simulate_transfers(const PipelineShape& shape, const std::vector<PassCosts>& costs,
                              const std::vector<Pass>& order) {
    return Replay(shape, costs, order).run();
}

}  // namespace dynapipe
