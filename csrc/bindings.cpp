// megatron_dynapipe.planning._native: arrays in, arrays out. Nothing is converted: floats are refused, not rounded.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "arguments.h"
#include "arrays.h"
#include "budget.h"
#include "checks.h"
#include "costs.h"
#include "fast_verify.h"
#include "list_schedule.h"
#include "memory.h"
#include "orchestrate.h"
#include "partition.h"
#include "problem.h"
#include "reschedule.h"
#include "search.h"
#include "simulate.h"

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

// One batch: its problem and the cache of its costs, which all steps of planning share.
class BatchProblem {
public:
    explicit BatchProblem(const nb::kwargs& given) : problem_(problem_of(Keywords(given))) {
        costs_ = std::make_unique<CostCache>(problem_);
    }

    // sizes, modes, warm-up and total time of a partition; sizes are empty where none fits
    using Found = std::tuple<Integers, Integers, int64_t, int64_t>;

    std::tuple<Integers, std::vector<Found>> partition(const std::vector<Ints>& orders, bool improve) {
        std::vector<Integers> places;
        for (const Ints& order : orders) places.push_back(checked_order(order));
        require(!places.empty(), "at least one order");
        std::vector<Found> found;
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> guard(mutex_);
        OrderedPartitions best = best_partitions(problem_, *costs_, places, improve);
        for (Partition& each : best.partitions)
            found.emplace_back(std::move(each.sizes), std::move(each.modes), each.warmup, each.total);
        return {std::move(best.order), std::move(found)};
    }

    using Partitions = std::vector<std::tuple<Ints, Ints>>;  // sizes and modes of each

    // The time in ns that a search starts with, and the most micro-batches of a replica there; nothing where no start
    // fits, or is about as fast as `most`.
    std::optional<std::pair<int64_t, int64_t>> start(const Ints& order, const Partitions& partitions,
                                                     std::optional<int64_t> most) {
        const Integers places = checked_order(order);
        const std::vector<std::vector<Run>> checked = checked_partitions(partitions);
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> guard(mutex_);
        const std::optional<Start> start =
            dynapipe::start(problem_, *costs_, starting_rows(places), checked, most.value_or(kUnreachable));
        if (!start) return std::nullopt;
        return std::pair(start->makespan, start->rows);
    }

    // Of every replica: samples of its micro-batches one after another, how many each has, modes, whether they are packed,
    // and passes.
    using Replica = std::tuple<Integers, Integers, Integers, std::vector<bool>, std::vector<Pass>>;

    std::vector<Replica> run_search(const Ints& order, const Partitions& partitions, int64_t evaluations, uint64_t seed) {
        const Integers places = checked_order(order);
        require(evaluations >= kDefaultEvaluations, "at least 0 evaluations");
        const std::vector<std::vector<Run>> checked = checked_partitions(partitions);
        std::vector<Replica> result;
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> guard(mutex_);
        dynapipe::Found found = search(problem_, *costs_, starting_rows(places), checked, evaluations, seed);
        for (size_t r = 0; r < found.replicas.size(); ++r) {
            auto& [samples, sizes, modes, packed, passes] = result.emplace_back();
            for (const MicroBatch* batch : found.replicas[r].micro_batches) {
                for (int32_t place : batch->samples) samples.push_back(starting_rows_->maker.sample(place));
                sizes.push_back(batch->samples.size());
                modes.insert(modes.end(), batch->modes.begin(), batch->modes.end());
                packed.push_back(batch->packed);
            }
            passes = std::move(found.orders[r]);
        }
        return result;
    }

    // As `costs`, of packed rows: samples of all rows one after another, and how many each has.
    std::tuple<Out, std::vector<bool>> packed_costs(const Ints& samples, const Ints& sizes, const Ints& modes) {
        const size_t count = sizes.size(), stages = problem_.modules.size();
        Integers rows(kCosts * count * stages);
        std::vector<bool> covered(count);
        CostRow row;
        for_packed_rows(samples, sizes, modes, [&](size_t i, size_t mode, const std::vector<int32_t>& of_row) {
            costs_->packed_row(mode, of_row, row);
            covered[i] = row.covered;
            copy_costs(row, i, count, rows);
        });
        return {to_numpy(std::move(rows), kCosts * count), std::move(covered)};
    }

    // [rows][kinds · kQuantities] what the modules of packed rows cost, and whether the cost model covers each row.
    std::tuple<Out, std::vector<bool>> packed_modules(const Ints& samples, const Ints& sizes, const Ints& modes) {
        const size_t width = problem_.rows.count();
        Integers rows(sizes.size() * width);
        std::vector<bool> covered(sizes.size());
        Integers costs;
        for_packed_rows(samples, sizes, modes, [&](size_t i, size_t mode, const std::vector<int32_t>& of_row) {
            covered[i] = costs_->packed_modules(mode, of_row, costs);
            if (covered[i]) std::copy_n(costs.data(), width, rows.data() + i * width);
        });
        return {to_numpy(std::move(rows), sizes.size()), std::move(covered)};
    }

    // [kCosts * micro-batches][virtual stages], by kind of cost as PassCosts has them; and whether the cost model covers each
    std::tuple<Out, std::vector<bool>> costs(const Ints& sizes, const Ints& inputs, const Ints& targets,
                                             const Ints& modes, const Ints& labels) {
        const size_t count = sizes.size(), stages = problem_.modules.size();
        require(inputs.size() == count && targets.size() == count && modes.size() == count && labels.size() == count,
                "a size, lengths, a mode and labels for every micro-batch");
        Integers rows(kCosts * count * stages);
        std::vector<bool> covered(count);
        const std::lock_guard<std::mutex> guard(mutex_);
        for (size_t i = 0; i < count; ++i) {
            const int64_t mode = modes.data()[i];
            Shape shape = checked_shape(sizes.data()[i], inputs.data()[i], targets.data()[i], mode);
            require(labels.data()[i] >= 0 && labels.data()[i] <= kLargestCoordinate * kLargestCoordinate, "labels from 0 to 2^40");
            shape.labels = labels.data()[i];
            const CostRow& row = costs_->row(mode, shape);
            covered[i] = row.covered;
            copy_costs(row, i, count, rows);
        }
        return {to_numpy(std::move(rows), kCosts * count), std::move(covered)};
    }

    // The first virtual stage on which a padded micro-batch has no costs, or -1.
    int64_t uncovered_stage(int64_t size, int64_t input, int64_t target, int64_t mode) {
        const Shape shape = checked_shape(size, input, target, mode);
        const std::lock_guard<std::mutex> guard(mutex_);
        return costs_->uncovered_stage(mode, shape);
    }

private:
    // Calls visit(row, mode, samples) for each of some packed rows.
    template <typename Visit>
    void for_packed_rows(const Ints& samples, const Ints& sizes, const Ints& modes, Visit visit) {
        require(modes.size() == sizes.size(), "a mode for every row");
        std::vector<int32_t> of_row;
        const std::lock_guard<std::mutex> guard(mutex_);
        int64_t first = 0;
        for (size_t i = 0; i < sizes.size(); ++i) {
            const int64_t size = sizes.data()[i], mode = modes.data()[i];
            require(size >= 1 && size <= static_cast<int64_t>(samples.size()) - first, "samples of every row");
            require(mode >= 0 && mode < static_cast<int64_t>(problem_.modes.size()), "modes that there are");
            of_row.clear();
            for (int64_t k = first; k < first + size; ++k) {
                const int64_t sample = samples.data()[k];
                require(sample >= 0 && sample < static_cast<int64_t>(problem_.samples()), "samples that there are");
                of_row.push_back(static_cast<int32_t>(sample));
            }
            first += size;
            visit(i, mode, of_row);
        }
    }

    // Puts micro-batch i's costs into rows of `count` micro-batches by kind of cost: [kCosts][count][virtual stages].
    void copy_costs(const CostRow& row, size_t i, size_t count, Integers& rows) const {
        const size_t stages = problem_.modules.size();
        for (size_t cost = 0; cost < kCosts; ++cost)
            std::copy_n(row.values.data() + cost * stages, stages, rows.data() + (cost * count + i) * stages);
    }

    Shape checked_shape(int64_t size, int64_t input, int64_t target, int64_t mode) const {
        require(mode >= 0 && mode < static_cast<int64_t>(problem_.modes.size()), "modes that there are");
        require(size >= 1 && size <= kLargestCoordinate, "sizes from 1 to 2^20");
        for (int64_t length : {input, target})
            require(length >= 0 && length <= kLargestCoordinate, "lengths from 0 to 2^20");
        return {size, input, target};
    }

    Integers checked_order(const Ints& order) const {
        std::vector<bool> seen(problem_.samples());
        const Integers places = copy(order);
        for (int64_t place : places) {
            require(place >= 0 && place < static_cast<int64_t>(seen.size()) && !seen[place],
                    "orders that name every sample once");
            seen[place] = true;
        }
        require(places.size() == seen.size(), "orders that name every sample once");
        return places;
    }

    StartingRows& starting_rows(const Integers& order) {
        if (!starting_rows_ || starting_rows_->order != order)
            starting_rows_ = std::make_unique<StartingRows>(problem_, *costs_, order);
        return *starting_rows_;
    }

    std::vector<std::vector<Run>> checked_partitions(const Partitions& partitions) const {
        std::vector<std::vector<Run>> checked;
        for (const auto& [sizes, modes] : partitions) checked.push_back(checked_partition(sizes, modes));
        return checked;
    }

    std::vector<Run> checked_partition(const Ints& sizes, const Ints& modes) const {
        require(sizes.size() == modes.size(), "a mode for every micro-batch");
        std::vector<Run> partition;
        int64_t first = 0;
        const int64_t samples = problem_.samples();
        for (size_t i = 0; i < sizes.size(); ++i) {
            const int64_t size = sizes.data()[i], mode = modes.data()[i];
            require(size >= 1 && size <= samples - first, "micro-batches that add up to all samples");
            require(mode >= 0 && mode < static_cast<int64_t>(problem_.modes.size()), "modes that there are");
            partition.push_back({first, size, mode});
            first += size;
        }
        require(first == samples, "micro-batches that add up to all samples");
        return partition;
    }

    Problem problem_;
    std::unique_ptr<CostCache> costs_;
    std::unique_ptr<StartingRows> starting_rows_;
    std::mutex mutex_;  // of the cache and of the starting rows
};

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
                                                           const Matrix& order, bool queue_links,
                                                           bool peak_covers_backward, int64_t receive_ahead,
                                                           bool ordered_starts) {
    const PipelineShape shape =
        pipeline_shape(chunks, model_state, 0, forward_only, peak_covers_backward, receive_ahead, ordered_starts);
    require(shape.transfers.are_plain() || !queue_links, "queued links, or starts of transfers that wait");
    const ScheduleCosts given(arrays, shape.virtual_stages());
    const std::vector<PassCosts>& costs = given.rows;
    require(order.shape(0) == model_state.size(), "passes of every stage");
    for (size_t i = 0; i < order.size(); ++i)
        require(order.data()[i] >= kNoPass && order.data()[i] < static_cast<int64_t>(costs.size()) * kPassKinds * chunks,
                "passes of the micro-batches and chunks that there are");
    const std::vector<Pass> passes(order.data(), order.data() + order.size());
    Simulation run;
    Integers peaks;
    {
        nb::gil_scoped_release release;
        run = simulate(shape, costs, passes, queue_links);
        if (!run.stalled) peaks = peak_memory(shape, costs, passes);
    }
    return {to_numpy(std::move(run.start), shape.stages), to_numpy(std::move(run.end), shape.stages),
            std::move(peaks), run.makespan, run.stalled ? std::move(run.position) : Integers()};
}

std::tuple<int64_t, std::vector<uint8_t>> run_list_schedule(
    const std::vector<Matrix>& arrays, int64_t chunks, const Ints& model_state, int64_t memory_limit, bool forward_only,
    const Ints& depth, int64_t rule, bool peak_covers_backward, int64_t least_gap, int64_t bound, const Integers& before) {
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

// The least makespan of known micro-batches, whose `values` are [micro-batches][modules][kQuantities], divided at the cuts.
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
    int64_t units, const Matrix& forward, const Matrix& backward, const Matrix& stored, const Array<double, 1>& boundary,
    const Array<double, 1>& parameters, const Ints& state_bytes, int64_t memory_limit, const Ints& replicas,
    const Array<double, 2>& reductions, const Array<double, 3>& transfers, const Ints& first_choice,
    const Ints& choice_placement, const Ints& choice_state, const Ints& free_devices, int64_t incumbent, int64_t beam,
    int64_t most) {
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
    nb::class_<BatchProblem>(module, "BatchProblem", "See megatron_dynapipe.planning.problem.BatchProblem.")
        .def(nb::init<const nb::kwargs&>())
        .def("partition", &BatchProblem::partition, "orders"_a.noconvert(), "improve"_a,
             "The order chosen, and (sizes, modes, warm-up, total) per option, sizes empty where no partition fits.")
        .def("start", &BatchProblem::start, "order"_a.noconvert(), "partitions"_a.noconvert(), "most"_a = nb::none(),
             "(ns, micro-batches of a replica) that a search starts with, or None.")
        .def("search", &BatchProblem::run_search, "order"_a.noconvert(), "partitions"_a.noconvert(), "evaluations"_a,
             "seed"_a, "(samples, sizes, modes, whether packed, passes of every stage) per replica.")
        .def("packed_costs", &BatchProblem::packed_costs, "samples"_a.noconvert(), "sizes"_a.noconvert(),
             "modes"_a.noconvert(), "Rows of costs, and whether the cost model covers each packed row.")
        .def("packed_modules", &BatchProblem::packed_modules, "samples"_a.noconvert(), "sizes"_a.noconvert(),
             "modes"_a.noconvert(), "Costs of the modules of packed rows, and whether the cost model covers each row.")
        .def("costs", &BatchProblem::costs, "sizes"_a.noconvert(), "inputs"_a.noconvert(), "targets"_a.noconvert(),
             "modes"_a.noconvert(), "labels"_a.noconvert(),
             "Rows of costs, and whether the cost model covers each micro-batch.")
        .def("uncovered_stage", &BatchProblem::uncovered_stage, "size"_a, "input_length"_a, "target_length"_a, "mode"_a,
             "The first virtual stage on which a padded micro-batch has no costs, or -1.");
    module.def("simulate", &run_simulate, "costs"_a.noconvert(), "chunks"_a, "model_state"_a.noconvert(),
               "forward_only"_a, "order"_a.noconvert(), "queue_links"_a, "peak_covers_backward"_a = false, "receive_ahead"_a = -1, "ordered_starts"_a = false,
               "See megatron_dynapipe.planning.simulate; (starts, ends, peak bytes, makespan, passes run on each stage where it stalls).");
    module.def("list_schedule", &run_list_schedule, "costs"_a.noconvert(), "chunks"_a, "model_state"_a.noconvert(),
               "memory_limit"_a, "forward_only"_a, "depth"_a.noconvert(), "rule"_a, "peak_covers_backward"_a = false,
               "least_gap"_a = kUndivided, "bound"_a = kUnreachable, "before"_a = Integers(),
               "See megatron_dynapipe.planning.schedules.list_scheduling; (makespan, 1 per forward of every stage).");
    module.def("reschedule", &run_reschedule, "See megatron_dynapipe.planning.rescheduling; the makespan.");
    module.def("fast_verify", &run_fast_verify, "lists"_a, "chunks"_a, "micro_batches"_a, "forward_only"_a, "ordered_starts"_a = false,
               "See megatron_dynapipe.planning.native; (whether lists hold, steps of passes and of sends, elements of messages).");
    module.def("orchestrate", &run_orchestrate, nb::kw_only(), "units"_a, "forward"_a.noconvert(),
               "backward"_a.noconvert(), "stored"_a.noconvert(), "boundary"_a.noconvert(), "parameters"_a.noconvert(),
               "state_bytes"_a.noconvert(), "memory_limit"_a, "replicas"_a.noconvert(), "reductions"_a.noconvert(),
               "transfers"_a.noconvert(), "first_choice"_a.noconvert(), "choice_placement"_a.noconvert(),
               "choice_state"_a.noconvert(), "free_devices"_a.noconvert(), "incumbent"_a, "beam"_a, "most"_a,
               "See megatron_dynapipe.tools.tuning.orchestrate; (bound, ends, placements) of plans, least bound dropped.");
}

}  // namespace dynapipe
