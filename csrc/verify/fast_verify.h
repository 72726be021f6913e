// Fast verification of instruction lists, from the bytes in which they are published (core/verify.py states the rules).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dynapipe {

struct ListShape {
    int64_t chunks, micro_batches;
    bool forward_only;
    bool ordered_starts;  // a send's start waits for the channel's previous message
};

// Where passes and starts of sends stand in every list.
struct Verified {
    bool holds = false;
    std::vector<std::vector<int64_t>> passes, sends;
    std::vector<std::vector<int64_t>> messages;  // elements that are held while each pass runs (core/memory.py)
};

// `data` is one list per pipeline rank in MessagePack, as msgspec writes core/instructions.py. Trusts nothing of it.
// What does not hold here is left to core/verify.py, which says what is wrong.
Verified fast_verify(const uint8_t* data, size_t size, const ListShape& shape);

// What lists are written by, for Python to hold against its own: numbers of instructions, buffers and payloads,
// elements of instructions, and how far a stage of a forward-only plan runs ahead: {name: {member: number}}.
using Numbers = std::vector<std::pair<const char*, std::vector<std::pair<const char*, int64_t>>>>;
Numbers instruction_numbers();

}  // namespace dynapipe
