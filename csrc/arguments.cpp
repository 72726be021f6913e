#include "arguments.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <tuple>
#include <utility>

#include "checks.h"
#include "schedule/list_schedule.h"
#include "search/budget.h"
#include "verify/fast_verify.h"

namespace dynapipe {
namespace {

// Sizes, inputs, targets; values and separate values: [kinds][kQuantities][sizes][inputs][targets].
using Mode = std::tuple<Ints, Ints, Ints, Array<int64_t, 5>, Array<int64_t, 5>>;
// Positions of a row: inputs, targets, linear part [kinds][kQuantities][inputs][targets]; of a sample: inputs, targets,
// attention. Empty where not measured.
using PackedMode = std::tuple<Ints, Ints, Array<int64_t, 4>, Ints, Ints, Array<int64_t, 4>>;

std::vector<Grid> grids(const std::vector<Mode>& modes) {
    std::vector<Grid> grids;
    for (const auto& [sizes, inputs, targets, values, separate] : modes)
        grids.push_back({{copy(sizes)}, {copy(inputs)}, {copy(targets)}, view(values), view(separate)});
    return grids;
}

std::vector<PackedGrid> packed_grids(const std::vector<PackedMode>& modes) {
    std::vector<PackedGrid> grids;
    for (const auto& [row_inputs, row_targets, linear, inputs, targets, attention] : modes)
        grids.push_back(
            {{copy(row_inputs)}, {copy(row_targets)}, view(linear), {copy(inputs)}, {copy(targets)}, view(attention)});
    return grids;
}

// Each with its time over its batch's estimate and [rows][3 + virtual stages]: replica, inputs, targets, modes.
std::vector<Precedent> precedents(const std::vector<std::pair<int64_t, Matrix>>& given, const Problem& problem) {
    const size_t stages = problem.modules.size();
    std::vector<Precedent> precedents;
    for (const auto& [over_estimate, rows] : given) {
        require(rows.shape(1) == 3 + stages && over_estimate > 0, "rows of precedents with a mode for every stage");
        Precedent& precedent = precedents.emplace_back(Precedent{over_estimate, {}});
        for (size_t i = 0; i < rows.shape(0); ++i) {
            const int64_t* row = rows.data() + i * rows.shape(1);
            require(std::min({row[0], row[1], row[2]}) >= 0 && std::max(row[1], row[2]) <= kLargestCost,
                    "rows of precedents on replicas that there may be, with positions");
            for (size_t v = 0; v < stages; ++v)
                require(row[3 + v] >= 0 && row[3 + v] < static_cast<int64_t>(problem.modes.size()),
                        "rows of precedents with modes that there are");
            precedent.rows.push_back({row[0], row[1], row[2], {row + 3, row + 3 + stages}});
        }
    }
    return precedents;
}

}  // namespace

Links links_of(Keywords& given) {
    return {.bytes_per_position = given.get<int64_t>("bytes_per_position"),
            .held_per_position = given.get<int64_t>("held_per_position"),
            .decoder_forward = given.flags("decoder_forward"),
            .decoder_backward = given.flags("decoder_backward"),
            .latency_ns = given.values<double>("latency_ns"),
            .gbps = given.values<double>("gbps")};
}

Problem problem_of(Keywords given) {
    const Integers model_state = given.values<int64_t>("model_state");
    const auto in_flight = given.get<Matrix>("in_flight");
    require(in_flight.shape(1) == model_state.size(), "micro-batches in flight for every stage");
    Problem problem{
        .inputs = given.values<int64_t>("inputs"),
        .targets = given.values<int64_t>("targets"),
        .input_positions = given.values<int64_t>("input_positions"),
        .target_positions = given.values<int64_t>("target_positions"),
        .may_pad = given.get<bool>("may_pad"),
        .may_pack = given.get<bool>("may_pack"),
        .modes = grids(given.get<std::vector<Mode>>("modes")),
        .packed = packed_grids(given.get<std::vector<PackedMode>>("packed")),
        .modules = {},
        .every_quantity = given.get<bool>("every_quantity"),
        .even_two = given.get<bool>("even_two"),
        .pipeline = {.stages = static_cast<int64_t>(model_state.size()),
                     .chunks = given.get<int64_t>("chunks"),
                     .forward_only = given.get<bool>("forward_only"),
                     .model_state = model_state,
                     .memory_limit = given.get<int64_t>("memory_limit"),
                     .peak_covers_backward = given.get<bool>("peak_covers_backward"),
                     .transfers = {.receive_ahead = given.get<int64_t>("receive_ahead"),
                                   .ordered_starts = given.get<bool>("ordered_starts")}},
        .links = links_of(given),
        .in_flight = {in_flight.data(), in_flight.data() + in_flight.size()},
        .replicas = given.get<int64_t>("replicas"),
        .division = static_cast<Division>(given.get<int64_t>("division")),
        .row_multiple = given.get<int64_t>("row_multiple"),
        .chains = given.values<int32_t>("chains"),
        .extras = given.values<int64_t>("extras"),
        .rows = {.kinds = static_cast<size_t>(given.get<int64_t>("kinds")), .read = {}},
        .labels = given.values<int64_t>("labels"),
        .labelled = given.values<int64_t>("labelled"),
    };
    require(problem.division >= Division::kOff && problem.division < Division::kDivisions, "a division that there is");
    require(problem.row_multiple >= 1 && problem.row_multiple <= 1 << 20, "rows in multiples of 1 to 2^20 positions");
    require(problem.rows.kinds >= 1 && problem.rows.kinds <= 4096, "between 1 and 4096 kinds of modules");
    const Integers modules = given.values<int64_t>("modules"), cuts = given.values<int64_t>("cuts");
    problem.modules = divided_at(modules, cuts, problem.rows.kinds);
    const Integers percent = given.values<int64_t>("corrections");
    require(percent.empty() || percent.size() == 3 * problem.modules.size(), "three corrections for every stage");
    for (size_t v = 0; 3 * v < percent.size(); ++v) {
        const Correction correction{percent[3 * v], percent[3 * v + 1], percent[3 * v + 2]};
        require(std::min({correction.forward, correction.input, correction.weight}) > 0 &&
                    std::max({correction.forward, correction.input, correction.weight}) <= kMostPercent,
                "corrections from 1 to 1000 percent");
        problem.modules[v].correct(correction);
    }
    problem.precedents = precedents(given.get<std::vector<std::pair<int64_t, Matrix>>>("precedents"), problem);
    given.done();
    problem.check();
    problem.choose_rows();
    return problem;
}

nb::dict constants() {
    nb::dict found;
    found["ABSENT"] = kAbsent;
    found["LARGEST_COST"] = kLargestCost;
    found["LARGEST_COORDINATE"] = kLargestCoordinate;
    found["NEVER"] = kUnreachable;
    const auto add = [&](const char* name, const std::vector<std::pair<const char*, int64_t>>& numbers) {
        nb::dict named;
        for (const auto& [member, number] : numbers) named[member] = number;
        found[name] = named;
    };
    add("Quantity", {{"FORWARD", kForward},
                     {"BACKWARD", kBackward},
                     {"STORED", kStored},
                     {"PEAK", kPeak},
                     {"WEIGHT", kWeight},
                     {"ENTRY_STORED", kEntryStored},
                     {"ENTRY_PEAK", kEntryPeak}});
    add("SplitBackward", {{"off", static_cast<int64_t>(Division::kOff)},
                          {"auto", static_cast<int64_t>(Division::kAuto)},
                          {"on", static_cast<int64_t>(Division::kOn)}});
    add("Rule", {{"BACKWARD_FIRST", static_cast<int64_t>(Rule::kBackwardFirst)},
                 {"FORWARD_FIRST", static_cast<int64_t>(Rule::kForwardFirst)},
                 {"STRICT", static_cast<int64_t>(Rule::kStrict)}});
    add("Pass", {{"Forward", kForwardPass},
                 {"Backward", kBackwardPass},
                 {"BackwardInput", kInputPass},
                 {"BackwardWeight", kWeightPass}});
    nb::list names;
    for (const char* name : kCostNames) names.append(name);
    found["costs"] = names;
    for (const auto& [name, numbers] : instruction_numbers()) add(name, numbers);
    return found;
}

}  // namespace dynapipe
