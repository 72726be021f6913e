#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "checks.h"
#include "verify.h"

namespace nb = nanobind;

namespace dynapipe {
namespace {

using Steps = std::vector<std::vector<int64_t>>;

std::tuple<bool, Steps, Steps> bound_prove(const nb::bytes& lists, int64_t chunks, int64_t micro_batches,
                                           bool forward_only) {
    require(chunks >= 1 && chunks <= 4096, "between 1 and 4096 chunks");
    require(micro_batches >= 0 && micro_batches <= (int64_t{1} << 24) / chunks, "at most 2^24 micro-batches times chunks");
    Proof proof;
    {
        nb::gil_scoped_release release;
        proof = prove(reinterpret_cast<const uint8_t*>(lists.c_str()), lists.size(),
                      {chunks, micro_batches, forward_only});
    }
    return {proof.holds, std::move(proof.passes), std::move(proof.sends)};
}

}  // namespace

void bind_verify(nb::module_& module) {
    module.def("prove", &bound_prove, nb::arg("lists"), nb::arg("chunks"), nb::arg("micro_batches"),
               nb::arg("forward_only"),
               "See megatron_dynapipe.planning.prove; (whether it holds, steps of passes and of sends per rank).");
}

}  // namespace dynapipe
