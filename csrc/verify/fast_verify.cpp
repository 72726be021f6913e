#include "verify/fast_verify.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "costs/memory.h"

namespace dynapipe {
namespace {

// The numbers of core/instructions.py.
enum Kind : int64_t {
    kLoad = 1,
    kForward,
    kBackward,
    kSendStart,
    kSendWait,
    kRecvStart,
    kRecvWait,
    kFree,
    kBackwardInput,
    kBackwardWeight
};
// A record's name and the elements of its array, its number first. Python holds both against its own
// (core/native.py).
struct Record {
    const char* name;
    int64_t fields;
};
constexpr Record kRecords[] = {
    {"", 0},          {"Load", 2},     {"Forward", 3}, {"Backward", 3},      {"SendStart", 6},      {"SendWait", 5},
    {"RecvStart", 6}, {"RecvWait", 5}, {"Free", 4},    {"BackwardInput", 3}, {"BackwardWeight", 3},
};
enum Buffer : int64_t { kData = 1, kInput, kOutput, kOutputGrad, kInputGrad, kBuffers };
enum Payload : int64_t { kActivation = 1, kGradient, kPayloads };
// The life of a buffer, or of a pass (absent, then ready after its forward, then freed after its backward, between the
// halves of a divided one used); `kNone` is what a rank never has.
enum State : uint8_t { kNone, kAbsent, kReady, kMoving, kUsed, kFreed };

constexpr int64_t kMost = int64_t{1} << 40;          // above every number in a plan
constexpr int64_t kMostElements = int64_t{1} << 36;  // of a message, so that sums stay within 64 bits

struct Span {
    const uint8_t* begin;
    const uint8_t* end;
    bool operator==(const Span& other) const {
        return end - begin == other.end - other.begin && std::memcmp(begin, other.begin, end - begin) == 0;
    }
};

// The part of MessagePack that lists need: arrays and unsigned integers. After anything else, or past the end, `ok` is
// false and every number 0.
class Reader {
public:
    Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

    bool ok = true;

    int64_t array() {
        const uint8_t head = byte();
        if ((head & 0xf0) == 0x90) return head & 0x0f;
        if (head == 0xdc) return big_endian(2);
        if (head == 0xdd) return big_endian(4);
        return fail();
    }
    int64_t number() {
        const uint8_t head = byte();
        if (head < 0x80) return head;
        if (head < 0xcc || head > 0xcf) return fail();
        return big_endian(1 << (head - 0xcc));
    }
    // Shapes, an array of arrays of numbers, as their bytes; adds up the tensors' elements.
    Span shapes(int64_t& elements) {
        const uint8_t* begin = at_;
        for (int64_t tensors = array(); ok && tensors > 0; --tensors) {
            int64_t product = 1;
            for (int64_t sizes = array(); ok && sizes > 0; --sizes)
                if (__builtin_mul_overflow(product, number(), &product) || product > kMostElements) fail();
            elements += product;
            if (elements > kMostElements) fail();
        }
        return {begin, at_};
    }
    bool done() const { return ok && at_ == end_; }

private:
    int64_t fail() {
        ok = false;
        return 0;
    }
    uint8_t byte() {
        if (!ok || at_ == end_) {
            ok = false;
            return 0;
        }
        return *at_++;
    }
    int64_t big_endian(int bytes) {
        uint64_t value = 0;
        for (; bytes > 0; --bytes) value = value << 8 | byte();
        return ok && value < static_cast<uint64_t>(kMost) ? static_cast<int64_t>(value) : fail();
    }

    const uint8_t* at_;
    const uint8_t* end_;
};

// One end of a transfer.
struct Transfer {
    int64_t row, boundary, step;
    Span shapes;
    bool matches(const Transfer& other) const {
        return row == other.row && boundary == other.boundary && shapes == other.shapes;
    }
};

// A step that blocks until the peer has started the other end of transfer `number` of a payload.
struct Wait {
    int64_t step, payload, number;
    bool sending;
};

// Walks one rank's list, as core/verify_buffers.py does.
class Walk {
public:
    Walk(const ListShape& shape, int64_t stages, int64_t stage);

    bool step(Reader& reader);
    bool finished() const;

    std::vector<Transfer> sends[kPayloads], receives[kPayloads];
    std::vector<Wait> waits;
    std::vector<int64_t> passes, send_steps;
    int64_t length = 0;

    // Elements of messages while each pass runs: the pools' buffers so far; a kept input is counted with its pass.
    std::vector<int64_t> messages() const {
        std::vector<int64_t> elements;
        for (const UnderWay& at : under_way_) {
            int64_t sum = -at.kept;
            for (int64_t pool : {kInput, kOutput, kOutputGrad}) sum += at.most[pool] * largest_[pool];
            elements.push_back(sum);
        }
        return elements;
    }

private:
    bool forward(int64_t row, int64_t key);
    bool backward(int64_t key, State after);
    bool transfer(int64_t kind, Reader& reader);
    // What is sent shares a pool.
    static int64_t pool(int64_t buffer) { return buffer == kInputGrad ? int64_t{kOutput} : buffer; }
    void take(int64_t buffer, int64_t elements) {
        const int64_t pool = this->pool(buffer);
        now_.most[pool] = std::max(now_.most[pool], ++used_[pool]);
        largest_[pool] = std::max(largest_[pool], elements);
    }
    bool free(int64_t buffer, int64_t row, int64_t chunk);
    // Moves a buffer from one state to the next, and from no other.
    bool advance(int64_t buffer, int64_t key, State before, State after) {
        if (buffers_[buffer][key] != before) return false;
        buffers_[buffer][key] = after;
        return true;
    }
    bool advance_if_had(int64_t buffer, int64_t key, State before, State after) {
        return buffers_[buffer][key] == kNone || advance(buffer, key, before, after);
    }

    const ListShape shape_;
    const int64_t stages_, stage_;
    std::vector<State> buffers_[kBuffers], done_;
    std::vector<int64_t> forwards_left_, number_[kPayloads];
    bool receiving_[kPayloads] = {};
    struct UnderWay {
        int64_t most[kBuffers] = {}, kept = 0;  // buffers of each pool so far; elements of inputs that forwards keep
    };
    std::vector<int64_t> elements_[kBuffers];  // of each buffer's message
    std::vector<UnderWay> under_way_;          // at each pass
    UnderWay now_;
    int64_t used_[kBuffers] = {}, largest_[kBuffers] = {};  // buffers of each pool, elements
};

Walk::Walk(const ListShape& shape, int64_t stages, int64_t stage) : shape_(shape), stages_(stages), stage_(stage) {
    const size_t keys = shape.micro_batches * shape.chunks;
    buffers_[kData].assign(shape.micro_batches, kAbsent);
    forwards_left_.assign(shape.micro_batches, shape.chunks);
    done_.assign(keys, kAbsent);
    for (int64_t buffer = kInput; buffer < kBuffers; ++buffer) {
        const bool gradient = buffer == kOutputGrad || buffer == kInputGrad;
        buffers_[buffer].assign(keys, gradient && shape.forward_only ? kNone : kAbsent);
        elements_[buffer].assign(keys, 0);
        const bool inner = buffer == kInput || buffer == kInputGrad;  // towards the model's first layers
        if (stage != (inner ? 0 : stages - 1)) continue;
        for (size_t key = inner ? 0 : shape.chunks - 1; key < keys; key += shape.chunks) buffers_[buffer][key] = kNone;
    }
    for (std::vector<int64_t>& numbers : number_) numbers.assign(keys, 0);
}

bool Walk::step(Reader& reader) {
    const int64_t fields = reader.array(), kind = reader.number();
    if (!reader.ok || kind < kLoad || kind > kBackwardWeight || fields != kRecords[kind].fields) return false;
    bool fine;
    if (kind >= kSendStart && kind <= kRecvWait) {
        fine = transfer(kind, reader);
    } else {
        const int64_t buffer = kind == kFree ? reader.number() : 0, row = reader.number();
        const int64_t chunk = kind == kLoad ? 0 : reader.number();
        if (!reader.ok || row >= shape_.micro_batches || chunk >= shape_.chunks) return false;
        const int64_t key = row * shape_.chunks + chunk;
        if (kind == kLoad)
            fine = advance(kData, row, kAbsent, kReady);
        else if (kind == kForward)
            fine = forward(row, key);
        else if (kind == kFree)
            fine = free(buffer, row, chunk);
        else if (kind == kBackwardWeight)
            fine = std::exchange(done_[key], kFreed) == kUsed;
        else
            fine = backward(key, kind == kBackward ? kFreed : kUsed);
        if (kind != kLoad && kind != kFree) {
            const int64_t input = shape_.forward_only ? 0 : elements_[kInput][key];
            if (kind == kBackward || kind == kBackwardInput) now_.kept -= input;
            passes.push_back(length);
            under_way_.push_back(now_);
            if (kind == kForward) now_.kept += input;
        }
    }
    ++length;
    return fine;
}

bool Walk::forward(int64_t row, int64_t key) {
    if (buffers_[kData][row] != kReady || done_[key] != kAbsent) return false;
    done_[key] = kReady;
    --forwards_left_[row];
    return advance_if_had(kInput, key, kReady, shape_.forward_only ? kUsed : kReady) &&
           advance_if_had(kOutput, key, kAbsent, kReady);
}

bool Walk::backward(int64_t key, State after) {
    if (shape_.forward_only || done_[key] != kReady) return false;
    done_[key] = after;
    return advance_if_had(kOutputGrad, key, kReady, kUsed) && advance_if_had(kInput, key, kReady, kUsed) &&
           advance_if_had(kInputGrad, key, kAbsent, kReady);
}

bool Walk::transfer(int64_t kind, Reader& reader) {
    const int64_t payload = reader.number(), row = reader.number(), chunk = reader.number(), peer = reader.number();
    const bool starts = kind == kSendStart || kind == kRecvStart, sending = kind == kSendStart || kind == kSendWait;
    int64_t elements = 0;
    const Span shapes = starts ? reader.shapes(elements) : Span{};
    if (!reader.ok || payload < kActivation || payload > kGradient || row >= shape_.micro_batches ||
        chunk >= shape_.chunks)
        return false;
    const bool downstream = sending == (payload == kActivation);  // the peer is the next rank
    if (peer != (stage_ + (downstream ? 1 : stages_ - 1)) % stages_) return false;
    const int64_t key = row * shape_.chunks + chunk;
    const int64_t buffer =
        sending ? (payload == kActivation ? kOutput : kInputGrad) : (payload == kActivation ? kInput : kOutputGrad);
    std::vector<Transfer>& transfers = (sending ? sends : receives)[payload];
    if (!starts) {
        if (!advance(buffer, key, kMoving, sending ? kUsed : kReady)) return false;
        const int64_t last = static_cast<int64_t>(transfers.size()) - 1;
        waits.push_back({length, payload, sending ? number_[payload][key] : last, sending});
        if (!sending) receiving_[payload] = false;
        return true;
    }
    if (!sending && receiving_[payload]) return false;  // at most one unmatched receive on a channel
    if (!advance(buffer, key, sending ? kReady : kAbsent, kMoving)) return false;
    if (sending) {
        if (shape_.ordered_starts && !transfers.empty())
            waits.push_back({length, payload, static_cast<int64_t>(transfers.size()) - 1, true});
        number_[payload][key] = transfers.size();
        send_steps.push_back(length);
    } else {
        receiving_[payload] = true;
    }
    take(buffer, elements);
    elements_[buffer][key] = elements;
    transfers.push_back({row, chunk * stages_ + stage_ - !downstream, length, shapes});
    return true;
}

bool Walk::free(int64_t buffer, int64_t row, int64_t chunk) {
    if (buffer < kData || buffer >= kBuffers) return false;
    if (buffer != kData) {
        const int64_t key = row * shape_.chunks + chunk;
        --used_[pool(buffer)];
        return advance(buffer, key, kUsed, kFreed);
    }
    return chunk == 0 && forwards_left_[row] == 0 && advance(kData, row, kReady, kFreed);
}

// All passes have run, and all buffers are freed.
bool Walk::finished() const {
    const State run = shape_.forward_only ? kReady : kFreed;
    if (std::any_of(done_.begin(), done_.end(), [&](State state) { return state != run; })) return false;
    for (int64_t buffer = kData; buffer < kBuffers; ++buffer)
        for (State state : buffers_[buffer])
            if (state != kFreed && state != kNone) return false;
    return true;
}

// The n-th send of every channel is what its receiver receives n-th.
bool paired(const std::vector<Walk>& walks) {
    const size_t stages = walks.size();
    for (size_t stage = 0; stage < stages; ++stage) {
        for (int64_t payload : {kActivation, kGradient}) {
            const std::vector<Transfer>& sends = walks[stage].sends[payload];
            const std::vector<Transfer>& receives =
                walks[(stage + (payload == kActivation ? 1 : stages - 1)) % stages].receives[payload];
            if (!std::equal(sends.begin(), sends.end(), receives.begin(), receives.end(),
                            [](const Transfer& a, const Transfer& b) { return a.matches(b); }))
                return false;
        }
    }
    return true;
}

// Replays all lists against rendezvous channels, each as far as it can go: whether all reach their ends.
bool ends(const std::vector<Walk>& walks) {
    const size_t stages = walks.size();
    std::vector<size_t> done(stages, 0);
    std::vector<int64_t> reached(stages, 0);  // the step at which each list stands: its next wait, or its end
    std::vector<size_t> awake;
    for (size_t stage = 0; stage < stages; ++stage) awake.push_back(stage);
    while (!awake.empty()) {
        const size_t stage = awake.back();
        awake.pop_back();
        const Walk& walk = walks[stage];
        for (; done[stage] < walk.waits.size(); ++done[stage]) {
            const Wait& wait = walk.waits[done[stage]];
            const bool downstream = wait.sending == (wait.payload == kActivation);
            const size_t peer = (stage + (downstream ? 1 : stages - 1)) % stages;
            const auto& others = wait.sending ? walks[peer].receives : walks[peer].sends;
            if (reached[peer] <= others[wait.payload][wait.number].step) break;
        }
        const int64_t stands = done[stage] < walk.waits.size() ? walk.waits[done[stage]].step : walk.length;
        if (stands == reached[stage]) continue;
        reached[stage] = stands;
        awake.push_back((stage + 1) % stages);
        awake.push_back((stage + stages - 1) % stages);
    }
    for (size_t stage = 0; stage < stages; ++stage)
        if (done[stage] < walks[stage].waits.size()) return false;
    return true;
}

}  // namespace

Verified fast_verify(const uint8_t* data, size_t size, const ListShape& shape) {
    Verified verified;
    Reader reader(data, size);
    const int64_t stages = reader.array();
    std::vector<Walk> walks;
    for (int64_t stage = 0; stage < stages; ++stage) {
        walks.emplace_back(shape, stages, stage);
        const int64_t steps = reader.array();
        for (int64_t step = 0; step < steps; ++step)
            if (!walks.back().step(reader)) return verified;
        if (!reader.ok || !walks.back().finished()) return verified;
    }
    verified.holds = reader.done() && paired(walks) && ends(walks);
    for (Walk& walk : walks) {
        verified.passes.push_back(std::move(walk.passes));
        verified.sends.push_back(std::move(walk.send_steps));
        verified.messages.push_back(walk.messages());
    }
    return verified;
}

Numbers instruction_numbers() {
    std::vector<std::pair<const char*, int64_t>> numbers, fields;
    for (int64_t kind = kLoad; kind <= kBackwardWeight; ++kind) {
        numbers.emplace_back(kRecords[kind].name, kind);
        fields.emplace_back(kRecords[kind].name, kRecords[kind].fields);
    }
    return {{"Instruction", numbers},
            {"InstructionFields", fields},
            {"Buffer",
             {{"DATA", kData},
              {"INPUT", kInput},
              {"OUTPUT", kOutput},
              {"OUTPUT_GRAD", kOutputGrad},
              {"INPUT_GRAD", kInputGrad}}},
            {"Payload", {{"ACTIVATION", kActivation}, {"GRADIENT", kGradient}}},
            {"Lowering", {{"SENT_AHEAD", kSentAhead}}}};
}

}  // namespace dynapipe
