// megatron_dynapipe.core._native: arrays in, arrays out. Nothing is converted: floats are refused, not rounded.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <tuple>
#include <utility>

#include "arguments.h"
#include "arrays.h"
#include "batch_bindings.h"
#include "checks.h"
#include "costs/memory.h"
#include "costs/problem.h"
#include "schedule/list_schedule.h"
#include "schedule/reschedule.h"
#include "schedule/simulate.h"
#include "search/budget.h"
#include "search/orchestrate.h"
#include "verify/fast_verify.h"

namespace dynapipe {
using namespace nb::literals;
namespace {

PipelineShape pipeline_shape(int64_t chunks, const Ints& model_state, int64_t memory_limit, bool forward_only,
                             bool peak_covers_backward, int64_t receive_ahead = -1, bool ordered_starts = false) {
    PipelineShape shape{.stages = static_cast<int64_t>(model_state.size()),
                        .chunks = chunks,
                        .forward_only = forward_only,
                        .model_state = copy(model_state),
                        .memory_limit = memory_limit,
                        .peak_covers_backward = peak_covers_backward,
                        .transfers = {receive_ahead, ordered_starts}};
    shape.check();
    return shape;
}

// Costs of the micro-batches of a ScheduleProblem.
class ScheduleCosts {
public:
    // An array for every name in kCostNames.
    ScheduleCosts(const std::vector<Matrix>& arrays, size_t virtual_stages) : virtual_stages_(virtual_stages) {
        require(arrays.size() == kCosts, "an array of every kind of costs");
        const size_t count = arrays[0].shape(0);
        require(count < (size_t{1} << 20), "fewer than 2^20 micro-batches");
        values_.resize(count * kCosts * virtual_stages);
        for (size_t cost = 0; cost < kCosts; ++cost) {
            const Matrix& array = arrays[cost];
            require(array.shape(0) == count && array.shape(1) == virtual_stages,
                    "costs of the same micro-batches on every virtual stage");
            for (size_t i = 0; i < array.size(); ++i)
                require(array.data()[i] >= 0 && array.data()[i] <= kLargestCost, "costs from 0 to 2^42");
            for (size_t row = 0; row < count; ++row)
                std::copy_n(array.data() + row * virtual_stages, virtual_stages,
                            values_.data() + (row * kCosts + cost) * virtual_stages);
        }
        for (size_t row = 0; row < count; ++row) {
            rows.emplace_back(values_.data() + row * kCosts * virtual_stages, virtual_stages);
            for (size_t v = 0; v < virtual_stages; ++v)
                require(rows.back()(kWeightNs, v) <= rows.back()(kBackwardNs, v),
                        "second halves of at most a backward's time");
        }
    }
    ScheduleCosts(const ScheduleCosts&) = delete;

    std::vector<PassCosts> rows;

private:
    const size_t virtual_stages_;
    Integers values_;  // [micro-batches][kCosts][virtual stages]
};

std::tuple<Out, Out, Integers, int64_t, Integers> run_simulate(const std::vector<Matrix>& arrays, int64_t chunks,
                                                               const Ints& model_state, bool forward_only,
                                                               const Matrix& order, bool peak_covers_backward,
                                                               int64_t receive_ahead, bool ordered_starts) {
    const PipelineShape shape =
        pipeline_shape(chunks, model_state, 0, forward_only, peak_covers_backward, receive_ahead, ordered_starts);
    const ScheduleCosts given(arrays, shape.virtual_stages());
    const std::vector<PassCosts>& costs = given.rows;
    require(order.shape(0) == model_state.size(), "passes of every stage");
    for (size_t i = 0; i < order.size(); ++i)
        require(
            order.data()[i] >= kNoPass && order.data()[i] < static_cast<int64_t>(costs.size()) * kPassKinds * chunks,
            "passes of the micro-batches and chunks that there are");
    const std::vector<Pass> passes(order.data(), order.data() + order.size());
    Simulation run;
    Integers peaks;
    {
        nb::gil_scoped_release release;
        run = simulate(shape, costs, passes);
        if (!run.stalled) peaks = peak_memory(shape, costs, passes);
    }
    return {to_numpy(std::move(run.start), shape.stages), to_numpy(std::move(run.end), shape.stages), std::move(peaks),
            run.makespan, run.stalled ? std::move(run.position) : Integers()};
}

std::tuple<int64_t, std::vector<uint8_t>> run_list_schedule(const std::vector<Matrix>& arrays, int64_t chunks,
                                                            const Ints& model_state, int64_t memory_limit,
                                                            bool forward_only, const Ints& depth, int64_t rule,
                                                            bool peak_covers_backward, int64_t least_gap, int64_t bound,
                                                            const Integers& before) {
    const PipelineShape shape = pipeline_shape(chunks, model_state, memory_limit, forward_only, peak_covers_backward);
    const ScheduleCosts given(arrays, shape.virtual_stages());
    const std::vector<PassCosts>& costs = given.rows;
    require(depth.size() == model_state.size(), "a depth for every stage");
    for (size_t s = 0; s < depth.size(); ++s) require(depth.data()[s] >= 1, "depths of at least 1");
    require(rule >= 0 && rule < static_cast<int64_t>(Rule::kRules), "a rule that there is");
    const Policy policy{copy(depth), static_cast<Rule>(rule), least_gap};
    ListScheduler::Costs earlier;
    for (int64_t row : before) earlier.push_back(costs.at(row));
    std::vector<uint8_t> forwards;
    nb::gil_scoped_release release;
    ListScheduler scheduler(shape);
    ListScheduler::Trace trace;
    scheduler.run(earlier, policy, kUnreachable, nullptr, {}, nullptr, &trace);
    const int64_t makespan = scheduler.run(costs, policy, bound, &forwards, {}, &trace);
    for (uint8_t& kind : forwards) kind = kind == kForwardPass;
    return {makespan, std::move(forwards)};
}

// The least makespan of known micro-batches, whose `values` are [micro-batches][modules][kQuantities], divided at the
// cuts.
int64_t run_reschedule(const nb::kwargs& keywords) {
    Keywords given(keywords);
    const auto values = given.get<Array<int64_t, 3>>("values");
    const Integers inputs = given.values<int64_t>("inputs"), targets = given.values<int64_t>("targets");
    const Integers cuts = given.values<int64_t>("cuts"), model_state = given.values<int64_t>("model_state");
    const std::vector<double> shares = given.values<double>("shares");
    const bool divided = given.get<bool>("divided");
    PipelineShape shape{.stages = static_cast<int64_t>(model_state.size()),
                        .chunks = given.get<int64_t>("chunks"),
                        .forward_only = false,
                        .model_state = model_state,
                        .memory_limit = given.get<int64_t>("memory_limit"),
                        .peak_covers_backward = given.get<bool>("peak_covers_backward")};
    const Links links = links_of(given);
    given.done();
    shape.check();
    links.check(shape.virtual_stages());
    const size_t count = values.shape(0), modules = values.shape(1);
    require(values.shape(2) == kQuantities, "every quantity of every module");
    require(inputs.size() == count && targets.size() == count, "positions of every micro-batch");
    require(count < (size_t{1} << 20), "fewer than 2^20 micro-batches");
    for (const Integers* positions : {&inputs, &targets})
        for (int64_t number : *positions)
            require(number >= 0 && number <= kLargestCoordinate * kLargestCoordinate, "positions from 0 to 2^40");
    for (double share : shares) require(share >= 1 && share <= 3, "shares of the memory from 1 to 3");
    for (size_t i = 0; i < values.size(); ++i)
        require(values.data()[i] >= 0 && values.data()[i] <= kLargestCost, "costs of a module from 0 to 2^42");
    require(static_cast<int64_t>(cuts.size()) + 1 == shape.virtual_stages(), "a cut between virtual stages");
    Integers every_module(modules);
    std::iota(every_module.begin(), every_module.end(), int64_t{0});
    const std::vector<StageModules> stages = divided_at(every_module, cuts, modules);
    const KnownMicroBatches known{{values.data(), values.size()}, modules, inputs, targets};
    nb::gil_scoped_release release;
    return reschedule(shape, links, stages, known, divided, shares);
}

using Steps = std::vector<Integers>;

std::tuple<bool, Steps, Steps, Steps> run_fast_verify(const nb::bytes& lists, int64_t chunks, int64_t micro_batches,
                                                      bool forward_only, bool ordered_starts) {
    require(chunks >= 1 && chunks <= 4096, "between 1 and 4096 chunks");
    require(micro_batches >= 0 && micro_batches <= (int64_t{1} << 24) / chunks,
            "at most 2^24 micro-batches times chunks");
    Verified found;
    {
        nb::gil_scoped_release release;
        found = fast_verify(reinterpret_cast<const uint8_t*>(lists.c_str()), lists.size(),
                            {chunks, micro_batches, forward_only, ordered_starts});
    }
    return {found.holds, std::move(found.passes), std::move(found.sends), std::move(found.messages)};
}

std::tuple<std::vector<std::tuple<int64_t, Integers, Integers>>, int64_t> run_orchestrate(
    int64_t units, const Matrix& forward, const Matrix& backward, const Matrix& stored,
    const Array<double, 1>& boundary, const Array<double, 1>& parameters, const Ints& state_bytes, int64_t memory_limit,
    const Ints& replicas, const Array<double, 2>& reductions, const Array<double, 3>& transfers,
    const Ints& first_choice, const Ints& choice_placement, const Ints& choice_state, const Ints& free_devices,
    int64_t incumbent, int64_t beam, int64_t most) {
    require(forward.shape(0) >= 2 && forward.shape(1) >= 2, "costs of one replica and one layer at least");
    const size_t placements = replicas.size();
    require(reductions.shape(0) == 2 && reductions.shape(1) == placements, "latency and rate of every reduction");
    require(transfers.shape(0) == 2 && transfers.shape(1) == placements && transfers.shape(2) == placements,
            "latency and rate of every transfer");
    const auto values = [](const auto& matrix) { return Integers(matrix.data(), matrix.data() + matrix.size()); };
    const auto half = [](const double* data, size_t size, size_t which) {
        return std::vector<double>(data + which * size, data + (which + 1) * size);
    };
    OrchestrateProblem problem;
    problem.layers = forward.shape(1) - 1;
    problem.units = units;
    problem.most_replicas = forward.shape(0) - 1;
    problem.forward = values(forward);
    problem.backward = values(backward);
    problem.stored = values(stored);
    problem.boundary_bytes = copy(boundary);
    problem.parameter_bytes = copy(parameters);
    problem.state_bytes = copy(state_bytes);
    problem.memory_limit = memory_limit;
    problem.replicas = copy(replicas);
    problem.reduce_latency = half(reductions.data(), placements, 0);
    problem.reduce_rate = half(reductions.data(), placements, 1);
    problem.transfer_latency = half(transfers.data(), placements * placements, 0);
    problem.transfer_rate = half(transfers.data(), placements * placements, 1);
    problem.first_choice = copy(first_choice);
    problem.choice_placement = copy(choice_placement);
    problem.choice_state = copy(choice_state);
    problem.free_devices = copy(free_devices);
    Orchestrated found;
    {
        nb::gil_scoped_release release;
        found = orchestrate(problem, incumbent, beam, most);
    }
    std::vector<std::tuple<int64_t, Integers, Integers>> plans;
    for (OrchestratedPlan& plan : found.plans)
        plans.emplace_back(plan.bound, std::move(plan.ends), std::move(plan.placements));
    return {std::move(plans), found.dropped_bound};
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The planner's core.";
    module.attr("CONSTANTS") = constants();
    module.attr("FEW_ROWS") = kFewRows;
    nb::set_leak_warnings(false);  // a problem may well live until the interpreter ends
    bind_batch_problem(module);
    module.def("simulate", &run_simulate, "costs"_a.noconvert(), "chunks"_a, "model_state"_a.noconvert(),
               "forward_only"_a, "order"_a.noconvert(), "peak_covers_backward"_a = false, "receive_ahead"_a = -1,
               "ordered_starts"_a = false,
               "See megatron_dynapipe.core.simulate; (starts, ends, peak bytes, makespan, passes run on each stage "
               "where it stalls).");
    module.def("list_schedule", &run_list_schedule, "costs"_a.noconvert(), "chunks"_a, "model_state"_a.noconvert(),
               "memory_limit"_a, "forward_only"_a, "depth"_a.noconvert(), "rule"_a, "peak_covers_backward"_a = false,
               "least_gap"_a = kUndivided, "bound"_a = kUnreachable, "before"_a = Integers(),
               "See megatron_dynapipe.core.orders; (makespan, 1 per forward of every stage).");
    module.def("reschedule", &run_reschedule, "See megatron_dynapipe.choosing.rescheduling; the makespan.");
    module.def("fast_verify", &run_fast_verify, "lists"_a, "chunks"_a, "micro_batches"_a, "forward_only"_a,
               "ordered_starts"_a = false,
               "See megatron_dynapipe.core.native; (whether lists hold, steps of passes and of sends, elements of "
               "messages).");
    module.def(
        "orchestrate", &run_orchestrate, nb::kw_only(), "units"_a, "forward"_a.noconvert(), "backward"_a.noconvert(),
        "stored"_a.noconvert(), "boundary"_a.noconvert(), "parameters"_a.noconvert(), "state_bytes"_a.noconvert(),
        "memory_limit"_a, "replicas"_a.noconvert(), "reductions"_a.noconvert(), "transfers"_a.noconvert(),
        "first_choice"_a.noconvert(), "choice_placement"_a.noconvert(), "choice_state"_a.noconvert(),
        "free_devices"_a.noconvert(), "incumbent"_a, "beam"_a, "most"_a,
        "See megatron_dynapipe.tools.tuning.orchestrate; (bound, ends, placements) of plans, least bound dropped.");
}

}  // namespace dynapipe
