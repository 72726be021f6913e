// What crosses the boundary from Python is checked here, once; behind it, code trusts its input.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dynapipe {

constexpr int64_t kAbsent = -1;                        // a grid point that was never measured or did not fit
constexpr int64_t kLargestCost = int64_t{1} << 42;     // of one stage, in ns or bytes (cost/tables.py)
constexpr int64_t kLargestCoordinate = int64_t{1} << 20;  // of a grid axis
constexpr int64_t kUnreachable = int64_t{1} << 61;     // above every sum of costs; two of it fit 64 bits

// Raised as ValueError in Python, which turns it into an error of the package.
inline void require(bool condition, const std::string& expectation) {
    if (!condition) throw std::invalid_argument("expected " + expectation);
}

}  // namespace dynapipe
