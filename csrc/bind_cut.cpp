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

CutProblem read_problem(const Ints& inputs, const Ints& targets, const std::vector<Mode>& modes,
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
    const size_t stages = encoder_layers.size();
    for (size_t stage = 0; stage < stages; ++stage)
        problem.layers.push_back({encoder_layers.data()[stage], decoder_layers.data()[stage], stage + 1 == stages});
    for (const auto& [sizes, mode_inputs, mode_targets, values] : modes)
        problem.modes.push_back({{copy(sizes)}, {copy(mode_inputs)}, {copy(mode_targets)}, values.data()});
    problem.check();
    int64_t most_layers = 0;
    for (const StageLayers& stage : problem.layers)
        most_layers = std::max(most_layers, stage.encoder + stage.decoder + 2);
    for (size_t mode = 0; mode < modes.size(); ++mode)
        problem.modes[mode].check(std::get<3>(modes[mode]).size(), most_layers);
    return problem;
}

void check_order(const std::vector<int64_t>& order, size_t samples) {
    std::vector<bool> seen(samples);
    for (int64_t place : order) {
        require(place >= 0 && place < static_cast<int64_t>(samples) && !seen[place], "orders that name every sample once");
        seen[place] = true;
    }
    require(order.size() == samples, "orders that name every sample once");
}

std::tuple<std::vector<int64_t>, std::vector<Found>> cut(
    const Ints& inputs, const Ints& targets, const std::vector<Mode>& modes, const Ints& encoder_layers,
    const Ints& decoder_layers, const Ints& memory, const Options& in_flight, int64_t replicas, bool forward_only,
    const std::vector<Ints>& orders, bool refine) {
    const CutProblem problem = read_problem(inputs, targets, modes, encoder_layers, decoder_layers, memory, in_flight,
                                            replicas, forward_only);
    std::vector<std::vector<int64_t>> places;
    for (const Ints& order : orders) {
        places.push_back(copy(order));
        check_order(places.back(), problem.inputs.size());
    }
    require(!places.empty(), "at least one order");
    std::vector<Found> found;
    nb::gil_scoped_release release;
    OrderedCuts best = best_cuts(problem, places, refine);
    for (Cut& cut : best.cuts) found.emplace_back(std::move(cut.sizes), std::move(cut.modes), cut.fill, cut.total);
    return {std::move(best.order), std::move(found)};
}

}  // namespace

void bind_cut(nb::module_& module) {
    // Nothing is converted: floats must be refused, not rounded.
    module.def("cut", &cut, nb::arg("inputs").noconvert(), nb::arg("targets").noconvert(),
               nb::arg("modes").noconvert(), nb::arg("encoder_layers").noconvert(),
               nb::arg("decoder_layers").noconvert(), nb::arg("memory").noconvert(),
               nb::arg("in_flight").noconvert(), nb::arg("replicas"), nb::arg("forward_only"),
               nb::arg("orders").noconvert(), nb::arg("refine"),
               "See megatron_dynapipe.planning.partition.cut: the order chosen, and (sizes, modes, fill, total) per "
               "option, sizes empty where no cut fits.");
}

}  // namespace dynapipe
