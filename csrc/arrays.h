// numpy's arrays as the core takes and gives them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "costs/tables.h"

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

inline std::vector<uint8_t> copy_flags(const Array<bool, 1>& flags) {
    return {flags.data(), flags.data() + flags.size()};
}

// An array's values where they lie; the array lives as long as the view does.
template <typename Values>
View view(const Values& array) {
    auto owner = std::make_shared<Values>(array);
    return {{array.data(), array.size()}, std::move(owner)};
}

// Arguments by name, each read once where it is needed. Nothing is converted, and none may be missing or left over.
class Keywords {
public:
    explicit Keywords(const nb::kwargs& given) : given_(given) {}

    template <typename T>
    T get(const char* name) {
        ++read_;
        if (!given_.contains(name)) throw nb::type_error((std::string("expected an argument ") + name).c_str());
        T value;
        constexpr bool may_convert = std::is_integral_v<T> && !std::is_same_v<T, bool>;  // from integers of numpy
        if (!nb::try_cast(given_[name], value, may_convert))
            throw nb::type_error((std::string("got an argument of another type as ") + name).c_str());
        return value;
    }
    template <typename T>
    std::vector<T> values(const char* name) {
        return copy(get<Array<T, 1>>(name));
    }
    std::vector<uint8_t> flags(const char* name) { return copy_flags(get<Array<bool, 1>>(name)); }

    void done() const {
        if (read_ != given_.size()) throw nb::type_error("got an argument that there is not");
    }

private:
    const nb::kwargs& given_;
    size_t read_ = 0;
};

inline nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> to_numpy(Integers&& values, size_t rows) {
    auto* owned = new Integers(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Integers*>(p); });
    return {owned->data(), {rows, rows ? owned->size() / rows : 0}, owner};
}
using Out = decltype(to_numpy({}, 0));

}  // namespace dynapipe
