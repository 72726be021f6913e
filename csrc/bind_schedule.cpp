#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings.h"
#include "checks.h"
#include "interleave.h"
#include "search.h"
#include "simulate.h"

namespace nb = nanobind;

namespace dynapipe {
namespace {

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Reals = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const int64_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;
using Mode = std::tuple<Ints, Ints, Ints, Values>;

std::vector<int64_t> copy(const Ints& array) { return {array.data(), array.data() + array.size()}; }

Out to_numpy(std::vector<int64_t>&& values, size_t rows) {
    auto* owned = new std::vector<int64_t>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
    return Out(owned->data(), {rows, rows ? owned->size() / rows : 0}, owner);
}

// The rows of a PipelineProblem: forward, backward, stored, peak, forward transfer, backward transfer.
std::vector<PassCosts> pass_costs(const std::vector<Matrix>& arrays, size_t virtual_stages) {
    require(arrays.size() == 6, "six arrays of costs");
    std::vector<PassCosts> costs;
    for (const Matrix& array : arrays) {
        require(array.shape(0) == arrays[0].shape(0) && array.shape(1) == virtual_stages,
                "costs of the same micro-batches on every virtual stage");
        for (size_t i = 0; i < array.size(); ++i)
            require(array.data()[i] >= 0 && array.data()[i] <= kLargestCost, "costs from 0 to 2^42");
    }
    for (size_t row = 0; row < arrays[0].shape(0); ++row) {
        const auto at = [&](int k) { return arrays[k].data() + row * virtual_stages; };
        costs.push_back({at(0), at(1), at(2), at(3), at(4), at(5)});
    }
    return costs;
}

PipelineShape pipeline_shape(int64_t chunks, const Ints& model_state, int64_t memory_limit, bool forward_only,
                             bool peak_covers_backward) {
    require(model_state.size() >= 1 && model_state.size() <= 4096, "between 1 and 4096 ranks");
    require(chunks >= 1 && chunks <= 4096, "between 1 and 4096 chunks");
    require(memory_limit >= 0 && memory_limit <= (int64_t{1} << 60), "a memory limit from 0 to 2^60");
    for (size_t s = 0; s < model_state.size(); ++s)
        require(model_state.data()[s] >= 0 && model_state.data()[s] <= (int64_t{1} << 60), "model state from 0 to 2^60");
    return {static_cast<int64_t>(model_state.size()), chunks, forward_only, copy(model_state), memory_limit,
            peak_covers_backward};
}

std::tuple<Out, Out, std::vector<int64_t>, int64_t, bool> bound_simulate(
    const std::vector<Matrix>& arrays, int64_t chunks, const Ints& model_state, bool forward_only, const Matrix& order,
    bool queue_links, bool peak_covers_backward) {
    const PipelineShape shape = pipeline_shape(chunks, model_state, 0, forward_only, peak_covers_backward);
    const std::vector<PassCosts> costs = pass_costs(arrays, shape.virtual_stages());
    require(order.shape(0) == model_state.size(), "passes of every rank");
    require(costs.size() < (size_t{1} << 20), "fewer than 2^20 micro-batches");
    for (size_t i = 0; i < order.size(); ++i)
        require(order.data()[i] >= 0 && order.data()[i] < static_cast<int64_t>(costs.size()) * 2 * chunks,
                "passes of the micro-batches and chunks that there are");
    const std::vector<Pass> passes(order.data(), order.data() + order.size());
    Simulation run;
    {
        nb::gil_scoped_release release;
        run = simulate(shape, costs, passes, queue_links);
    }
    return {to_numpy(std::move(run.start), shape.stages), to_numpy(std::move(run.end), shape.stages),
            std::move(run.peak), run.makespan, run.stalled};
}

std::tuple<int64_t, std::vector<uint8_t>> bound_list_schedule(const std::vector<Matrix>& arrays, int64_t chunks,
                                                              const Ints& model_state, int64_t memory_limit,
                                                              bool forward_only, const Ints& depth, int64_t rule,
                                                              bool peak_covers_backward) {
    const PipelineShape shape = pipeline_shape(chunks, model_state, memory_limit, forward_only, peak_covers_backward);
    const std::vector<PassCosts> costs = pass_costs(arrays, shape.virtual_stages());
    require(chunks == 1 || shape.stages > 1, "several chunks only on several ranks");
    require(costs.size() < (size_t{1} << 20), "fewer than 2^20 micro-batches");
    require(depth.size() == model_state.size(), "a depth for every rank");
    for (size_t s = 0; s < depth.size(); ++s) require(depth.data()[s] >= 1, "depths of at least 1");
    require(rule >= 0 && rule < static_cast<int64_t>(Rule::kRules), "a rule that there is");
    std::vector<uint8_t> forwards;
    nb::gil_scoped_release release;
    std::vector<const PassCosts*> rows;
    for (const PassCosts& row : costs) rows.push_back(&row);
    const Policy policy{copy(depth), static_cast<Rule>(rule)};
    const int64_t makespan = chunks == 1 ? ListScheduler(shape).run(rows, policy, kUnreachable, &forwards)
                                         : InterleavedScheduler(shape).run(rows, policy, kUnreachable, &forwards);
    return {makespan, std::move(forwards)};
}

using BoundCut = std::tuple<Ints, Ints>;  // sizes, modes
// A replica: (first samples, sizes, modes, makespan, forwards).
using BoundReplica =
    std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t, std::vector<uint8_t>>;

std::vector<MicroBatch> checked_cut(const BoundCut& bound, const SearchProblem& problem) {
    const auto& [sizes, modes] = bound;
    require(sizes.size() == modes.size(), "a mode for every micro-batch");
    std::vector<MicroBatch> cut;
    int64_t first = 0;
    const int64_t samples = problem.inputs.size();
    for (size_t i = 0; i < sizes.size(); ++i) {
        const int64_t size = sizes.data()[i], mode = modes.data()[i];
        require(size >= 1 && size <= samples - first, "micro-batches that add up to all samples");
        require(mode >= 0 && mode < static_cast<int64_t>(problem.modes.size()), "modes that there are");
        cut.push_back({first, size, mode});
        first += size;
    }
    require(first == samples, "micro-batches that add up to all samples");
    return cut;
}

std::vector<BoundReplica> bound_search(const Ints& inputs, const Ints& targets, const std::vector<Mode>& modes,
                                       int64_t chunks, const Ints& encoder_layers, const Ints& decoder_layers, const Ints& model_state,
                                       int64_t memory_limit, bool forward_only, int64_t replicas,
                                       int64_t bytes_per_position, const Flags& decoder_forward,
                                       const Flags& decoder_backward, const Reals& latency_ns, const Reals& gbps,
                                       const std::vector<BoundCut>& cuts, int64_t evaluations, uint64_t seed,
                                       bool peak_covers_backward) {
    SearchProblem problem;
    problem.inputs = copy(inputs);
    problem.targets = copy(targets);
    problem.shape = pipeline_shape(chunks, model_state, memory_limit, forward_only, peak_covers_backward);
    problem.replicas = replicas;
    problem.links = {bytes_per_position,
                     {decoder_forward.data(), decoder_forward.data() + decoder_forward.size()},
                     {decoder_backward.data(), decoder_backward.data() + decoder_backward.size()},
                     {latency_ns.data(), latency_ns.data() + latency_ns.size()},
                     {gbps.data(), gbps.data() + gbps.size()}};
    require(encoder_layers.size() == decoder_layers.size(), "encoder and decoder layers of the same stages");
    int64_t most_layers = 1;
    for (size_t stage = 0; stage < encoder_layers.size(); ++stage) {
        const int64_t encoder = encoder_layers.data()[stage], decoder = decoder_layers.data()[stage];
        for (int64_t layers : {encoder, decoder})  // each by itself: their sum could overflow
            require(layers >= 0 && layers <= 65536, "0 to 65536 layers of a kind on a stage");
        problem.layers.push_back({encoder, decoder, stage + 1 == encoder_layers.size()});
        most_layers = std::max(most_layers, encoder + decoder + 2);
    }
    for (const auto& [sizes, mode_inputs, mode_targets, values] : modes)
        problem.modes.push_back({{copy(sizes)}, {copy(mode_inputs)}, {copy(mode_targets)}, values.data()});
    problem.check();
    for (size_t mode = 0; mode < modes.size(); ++mode)
        problem.modes[mode].check(std::get<3>(modes[mode]).size(), most_layers);
    require(evaluations >= 0, "at least 0 evaluations");
    std::vector<std::vector<MicroBatch>> checked;
    for (const BoundCut& cut : cuts) checked.push_back(checked_cut(cut, problem));

    std::vector<BoundReplica> result;
    nb::gil_scoped_release release;
    Found found = search(problem, checked, evaluations, seed);
    for (size_t r = 0; r < found.replicas.size(); ++r) {
        std::vector<int64_t> firsts, sizes, chosen;
        for (const MicroBatch& batch : found.replicas[r].micro_batches) {
            firsts.push_back(batch.first);
            sizes.push_back(batch.size);
            chosen.push_back(batch.mode);
        }
        result.emplace_back(std::move(firsts), std::move(sizes), std::move(chosen), found.replicas[r].makespan,
                            std::move(found.forwards[r]));
    }
    return result;
}

}  // namespace

void bind_schedule(nb::module_& module) {
    // Nothing is converted: floats must be refused, not rounded.
    module.def("simulate", &bound_simulate, nb::arg("costs").noconvert(), nb::arg("chunks"),
               nb::arg("model_state").noconvert(), nb::arg("forward_only"), nb::arg("order").noconvert(),
               nb::arg("queue_links"), nb::arg("peak_covers_backward") = false,
               "See megatron_dynapipe.planning.simulate; (starts, ends, peak bytes, makespan, whether it stalled).");
    module.def("list_schedule", &bound_list_schedule, nb::arg("costs").noconvert(), nb::arg("chunks"),
               nb::arg("model_state").noconvert(), nb::arg("memory_limit"), nb::arg("forward_only"),
               nb::arg("depth").noconvert(), nb::arg("rule"), nb::arg("peak_covers_backward") = false,
               "See megatron_dynapipe.planning.schedules.list_scheduling; (makespan, 1 per forward pass of each rank).");
    module.def("search", &bound_search, nb::arg("inputs").noconvert(), nb::arg("targets").noconvert(),
               nb::arg("modes").noconvert(), nb::arg("chunks"), nb::arg("encoder_layers").noconvert(),
               nb::arg("decoder_layers").noconvert(), nb::arg("model_state").noconvert(), nb::arg("memory_limit"),
               nb::arg("forward_only"), nb::arg("replicas"), nb::arg("bytes_per_position"),
               nb::arg("decoder_forward").noconvert(), nb::arg("decoder_backward").noconvert(),
               nb::arg("latency_ns").noconvert(), nb::arg("gbps").noconvert(), nb::arg("cuts").noconvert(),
               nb::arg("evaluations"), nb::arg("seed"), nb::arg("peak_covers_backward") = false,
               "See megatron_dynapipe.planning.search; per replica.");
}

}  // namespace dynapipe
