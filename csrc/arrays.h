// numpy's arrays as the core takes and gives them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace dynapipe {

namespace nb = nanobind;

template <typename T, size_t kDimensions>
using Array = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using Ints = Array<int64_t, 1>;
using Matrix = Array<int64_t, 2>;
using Integers = std::vector<int64_t>;

template <typename T>
std::vector<T> copy(const Array<T, 1>& array) {
    return {array.data(), array.data() + array.size()};
}

inline std::vector<uint8_t> copy_flags(const Array<bool, 1>& flags) { return {flags.data(), flags.data() + flags.size()}; }

inline nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> to_numpy(Integers&& values, size_t rows) {
    auto* owned = new Integers(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Integers*>(p); });
    return {owned->data(), {rows, rows ? owned->size() / rows : 0}, owner};
}
using Out = decltype(to_numpy({}, 0));

}  // namespace dynapipe
