// Proving instruction lists, as plan/verify.py does, from the bytes in which they are published.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynapipe {

struct ListShape {
    int64_t chunks, micro_batches;
    bool forward_only;
};

// Where passes and starts of sends stand in every list.
struct Proof {
    bool holds = false;
    std::vector<std::vector<int64_t>> passes, sends;
};

// `data` is one list per pipeline rank in MessagePack, as msgspec writes plan/instructions.py. Trusts nothing of it.
// What does not hold here may still be proven by the Python twin, which also says what is wrong.
Proof prove(const uint8_t* data, size_t size, const ListShape& shape);

}  // namespace dynapipe
