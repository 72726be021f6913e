// What crosses the boundary from Python is checked here, once; behind it, code trusts its input.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dynapipe {

constexpr int64_t kAbsent = -1;  // a grid point that was never measured or did not fit

// The limit on every cost, in ns (73 minutes) or bytes (4.4 TB), of a layer and of a stage (core/costs.py). A layer's
// cost above it is refused; a stage's makes the micro-batch infeasible. It keeps interpolation and sums within 64 bits.
constexpr int64_t kLargestCost = int64_t{1} << 42;

constexpr int64_t kLargestCoordinate = int64_t{1} << 20;  // of a grid axis
constexpr int64_t kLargestMessage = int64_t{1} << 40;     // bytes; larger ones count as this, which fits no device
constexpr int64_t kUnreachable = int64_t{1} << 61;        // above every sum of costs; two of it fit 64 bits

// Raised as ValueError in Python, which turns it into an error of the package.
inline void require(bool condition, const std::string& expectation) {
    if (!condition) throw std::invalid_argument("expected " + expectation);
}

}  // namespace dynapipe
