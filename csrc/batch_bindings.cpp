#include "batch_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "arguments.h"
#include "arrays.h"
#include "checks.h"
#include "costs/costs.h"
#include "costs/problem.h"
#include "search/packed_starts.h"
#include "search/partition.h"
#include "search/search.h"

namespace dynapipe {
using namespace nb::literals;
namespace {

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

    // What the batch may take in rows that suit it, in ns; nothing where no mode covers a sample.
    std::optional<int64_t> estimate(const Ints& order) {
        const Integers places = checked_order(order);
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> guard(mutex_);
        const int64_t estimate = estimated_ns(problem_, *costs_, starting_rows(places).maker);
        return estimate < kUnreachable ? std::optional(estimate) : std::nullopt;
    }

    // Of every replica: samples of its micro-batches one after another, how many each has, modes, whether they are
    // packed, passes, and the time in ns that the search found for them.
    using Replica = std::tuple<Integers, Integers, Integers, std::vector<bool>, std::vector<Pass>, int64_t>;

    std::vector<Replica> run_search(const Ints& order, const Partitions& partitions, int64_t evaluations, uint64_t seed,
                                    bool following) {
        const Integers places = checked_order(order);
        require(evaluations >= kDefaultEvaluations, "at least 0 evaluations");
        const std::vector<std::vector<Run>> checked = checked_partitions(partitions);
        std::vector<Replica> result;
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> guard(mutex_);
        StartingRows& rows = starting_rows(places);
        dynapipe::Found found = following ? follow(problem_, *costs_, rows, evaluations, seed)
                                          : search(problem_, *costs_, rows, checked, evaluations, seed);
        for (size_t r = 0; r < found.replicas.size(); ++r) {
            auto& [samples, sizes, modes, packed, passes, makespan] = result.emplace_back();
            makespan = found.replicas[r].makespan;
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
        RowSums sums;
        for_packed_rows(samples, sizes, modes, [&](size_t i, size_t mode, const std::vector<int32_t>& of_row) {
            costs_->packed_row(mode, of_row, sums, row);
            covered[i] = row.covered;
            copy_costs(row, i, count, rows);
        });
        return {to_numpy(std::move(rows), kCosts * count), std::move(covered)};
    }

    // As `packed_costs`, but priced as a search does it, from the row before and the samples that differ; and whether
    // each row fits alone.
    std::tuple<Out, std::vector<bool>> changed_costs(const Ints& samples, const Ints& sizes, const Ints& modes) {
        const size_t count = sizes.size(), stages = problem_.modules.size();
        Integers rows(kCosts * count * stages), every(problem_.samples());
        std::vector<bool> fits(count);
        std::iota(every.begin(), every.end(), int64_t{0});
        BatchMaker maker(problem_, *costs_, every);
        const MicroBatch* before = nullptr;
        for_packed_rows(samples, sizes, modes, [&](size_t i, size_t mode, const std::vector<int32_t>& of_row) {
            const MicroBatch* made = maker.make(of_row, Modes(stages, mode), true, before);
            fits[i] = made;
            if (!made) return;
            before = made;
            copy_costs(made->own, i, count, rows);
        });
        return {to_numpy(std::move(rows), kCosts * count), std::move(fits)};
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

    // [kCosts * micro-batches][virtual stages], by kind of cost as PassCosts has them; and whether the cost model
    // covers each
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
            require(labels.data()[i] >= 0 && labels.data()[i] <= kLargestCoordinate * kLargestCoordinate,
                    "labels from 0 to 2^40");
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

}  // namespace

void bind_batch_problem(nb::module_& module) {
    nb::class_<BatchProblem>(module, "BatchProblem", "See megatron_dynapipe.core.problem.BatchProblem.")
        .def(nb::init<const nb::kwargs&>())
        .def("partition", &BatchProblem::partition, "orders"_a.noconvert(), "improve"_a,
             "The order chosen, and (sizes, modes, warm-up, total) per option, sizes empty where no partition fits.")
        .def("start", &BatchProblem::start, "order"_a.noconvert(), "partitions"_a.noconvert(), "most"_a = nb::none(),
             "(ns, micro-batches of a replica) that a search starts with, or None.")
        .def("estimate", &BatchProblem::estimate, "order"_a.noconvert(), "ns in rows that suit the batch, or None.")
        .def("search", &BatchProblem::run_search, "order"_a.noconvert(), "partitions"_a.noconvert(), "evaluations"_a,
             "seed"_a, "following"_a, "(samples, sizes, modes, whether packed, passes of every stage, ns) per replica.")
        .def("packed_costs", &BatchProblem::packed_costs, "samples"_a.noconvert(), "sizes"_a.noconvert(),
             "modes"_a.noconvert(), "Rows of costs, and whether the cost model covers each packed row.")
        .def("changed_costs", &BatchProblem::changed_costs, "samples"_a.noconvert(), "sizes"_a.noconvert(),
             "modes"_a.noconvert(), "Rows of costs, each priced from the row before, and whether each fits alone.")
        .def("packed_modules", &BatchProblem::packed_modules, "samples"_a.noconvert(), "sizes"_a.noconvert(),
             "modes"_a.noconvert(), "Costs of the modules of packed rows, and whether the cost model covers each row.")
        .def("costs", &BatchProblem::costs, "sizes"_a.noconvert(), "inputs"_a.noconvert(), "targets"_a.noconvert(),
             "modes"_a.noconvert(), "labels"_a.noconvert(),
             "Rows of costs, and whether the cost model covers each micro-batch.")
        .def("uncovered_stage", &BatchProblem::uncovered_stage, "size"_a, "input_length"_a, "target_length"_a, "mode"_a,
             "The first virtual stage on which a padded micro-batch has no costs, or -1.");
}

}  // namespace dynapipe
