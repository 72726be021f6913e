#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings.h"
#include "checks.h"
#include "cut.h"

namespace nb = nanobind;

namespace dynapipe {
namespace {

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const int64_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Options = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mode = std::tuple<Ints, Ints, Ints, Values>;
using Found = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t>;

std::vector<int64_t> copy(const Ints& array) { return {array.data(), array.data() + array.size()}; }

std::vector<Found> cut(const Ints& inputs, const Ints& targets, const std::vector<Mode>& modes,
                       const Ints& encoder_layers, const Ints& decoder_layers, const Ints& memory,
                       const Options& in_flight, int64_t replicas, bool forward_only) {
    CutProblem problem;
    problem.inputs = copy(inputs);
    problem.targets = copy(targets);
    problem.memory = copy(memory);
    require(in_flight.shape(1) == memory.size(), "micro-batches in flight for every rank");
    problem.in_flight.assign(in_flight.data(), in_flight.data() + in_flight.size());
    problem.replicas = replicas;
    problem.forward_only = forward_only;
    require(encoder_layers.size() == decoder_layers.size(), "encoder and decoder layers of the same stages");
    int64_t most_layers = 0;
    for (size_t stage = 0; stage < encoder_layers.size(); ++stage) {
        const StageLayers layers{encoder_layers.data()[stage], decoder_layers.data()[stage],
                                 stage + 1 == encoder_layers.size()};
        problem.layers.push_back(layers);
    }
    for (const auto& [sizes, mode_inputs, mode_targets, values] : modes)
        problem.modes.push_back({{copy(sizes)}, {copy(mode_inputs)}, {copy(mode_targets)}, values.data()});
    problem.check();
    for (const StageLayers& stage : problem.layers)
        most_layers = std::max(most_layers, stage.encoder + stage.decoder + 1);
    for (size_t mode = 0; mode < modes.size(); ++mode) problem.modes[mode].check(std::get<3>(modes[mode]).size(), most_layers);

    std::vector<Found> found;
    nb::gil_scoped_release release;
    for (Cut& best : best_cuts(problem))
        found.emplace_back(std::move(best.sizes), std::move(best.modes), best.fill, best.total);
    return found;
}

}  // namespace

void bind_cut(nb::module_& module) {
    module.def("cut", &cut, nb::arg("inputs"), nb::arg("targets"), nb::arg("modes"), nb::arg("encoder_layers"),
               nb::arg("decoder_layers"), nb::arg("memory"), nb::arg("in_flight"), nb::arg("replicas"),
               nb::arg("forward_only"),
               "See megatron_dynapipe.planning.partition.cut; (sizes, modes, fill, total) per option, sizes empty "
               "where no cut fits.");
}

}  // namespace dynapipe
