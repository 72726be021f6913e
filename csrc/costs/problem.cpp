#include "costs/problem.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "checks.h"

namespace dynapipe {

int64_t Links::transfer_ns(size_t boundary, int64_t bytes) const {
    const size_t boundaries = decoder_forward.size();
    double least = std::numeric_limits<double>::infinity();
    for (size_t route = boundary; route < gbps.size(); route += boundaries)
        least = std::min(least, latency_ns[route] + static_cast<double>(bytes * 8) / gbps[route]);
    return static_cast<int64_t>(std::nearbyint(least));
}

void Links::check(size_t virtual_stages) const {
    for (const auto* flags : {&decoder_forward, &decoder_backward})
        require(flags->size() == virtual_stages - 1, "links between neighbouring stages");
    require(gbps.size() == latency_ns.size() && (!gbps.empty()) == (virtual_stages > 1) &&
                (virtual_stages == 1 || gbps.size() % (virtual_stages - 1) == 0),
            "links between neighbouring stages");
    for (double rate : gbps) require(rate > 0, "a rate above 0 on every link");
    for (double latency : latency_ns) require(latency >= 0 && latency < 1e15, "latencies from 0 to 1e15 ns");
    for (int64_t bytes : {bytes_per_position, held_per_position})
        require(bytes >= 0 && bytes <= kLargestCoordinate / 4, "0 to 2^18 bytes per position");
}

void PipelineShape::check() const {
    constexpr int64_t kMostBytes = int64_t{1} << 60;
    require(stages >= 1 && stages <= 4096, "between 1 and 4096 stages");
    require(chunks >= 1 && chunks <= 64, "between 1 and 64 chunks");
    require(chunks == 1 || stages > 1, "several chunks only on several stages");
    require(memory_limit >= 0 && memory_limit <= kMostBytes, "a memory limit from 0 to 2^60");
    for (int64_t bytes : model_state) require(bytes >= 0 && bytes <= kMostBytes, "model state from 0 to 2^60");
}

bool Problem::allows(size_t option, size_t other) const {
    const auto held = in_flight.begin() + option * stages(), more = in_flight.begin() + other * stages();
    return std::equal(held, held + stages(), more, std::less_equal<>());
}

void Problem::check() const {
    require(!inputs.empty() && inputs.size() < (size_t{1} << 24), "between 1 and 2^24 samples");
    require(targets.size() == samples(), "as many target lengths as input lengths");
    for (const auto* lengths : {&input_positions, &target_positions})
        require(lengths->size() == samples(), "positions of every sample");
    require(may_pad || may_pack, "at least one layout");
    for (const auto* lengths : {&inputs, &targets, &input_positions, &target_positions})
        for (int64_t length : *lengths) require(length >= 0 && length <= kLargestCoordinate, "lengths from 0 to 2^20");
    pipeline.check();
    require(modules.size() == stages() * chunks(), "modules of every virtual stage");
    links.check(modules.size());
    require(!in_flight.empty() && in_flight.size() % stages() == 0 && options() <= 26,
            "between 1 and 26 options of micro-batches in flight, for every stage");
    for (int64_t held : in_flight) require(held >= 1 && held <= 16384, "1 to 16384 micro-batches in flight");
    require(replicas >= 1 && replicas <= 65536, "1 to 65536 replicas");
    require(!modes.empty() && modes.size() <= 16, "between 1 and 16 recompute modes");
    require(packed.size() == modes.size(), "packed costs of every recompute mode");
    for (const Grid& grid : modes) grid.check(rows.count());
    for (const PackedGrid& grid : packed) grid.check(rows.count());
    check_chains();
    if (!counts_labels()) return;
    require(labels.size() == samples(), "labels of every sample");
    for (size_t i = 0; i < samples(); ++i)
        require(labels[i] >= 0 && labels[i] <= input_positions[i], "no more labels than positions");
    require(labelled.size() == 2 && labelled[0] >= -1 && labelled[1] >= 0, "kinds of the last MLP and of the head");
    for (int64_t kind : labelled) require(kind < static_cast<int64_t>(rows.kinds), "kinds of modules that there are");
}

void Problem::check_chains() const {
    if (!is_cut() && extras.empty()) return;
    require(may_pack, "packed rows, where samples are cut");
    require(!is_cut() || chains.size() == samples(), "a chain or -1 for every sample");
    require(extras.size() == modes.size() * samples() * rows.count(), "what pieces cost besides, under every mode");
    for (int64_t extra : extras)
        require(extra >= -kLargestCost && extra <= kLargestCost, "costs of pieces of at most 2^42");
    int32_t next = 0;
    for (size_t i = 0; i < chains.size(); ++i) {
        if (chains[i] < 0) continue;
        const bool goes_on = i > 0 && chains[i] == chains[i - 1];
        require(goes_on || chains[i] == next, "chains in order, the pieces of each one after another");
        next += !goes_on;
    }
}

void Problem::choose_rows() {
    const auto holds_more_than_zeros = [](const View& view, size_t row, size_t count) {
        const auto values = view.values.subspan(row * (view.values.size() / count), view.values.size() / count);
        return std::any_of(values.begin(), values.end(), [](int64_t value) { return value > 0; });
    };
    for (size_t row = 0; row < rows.count(); ++row) {
        const size_t kind = row / kQuantities;
        const int quantity = row % kQuantities;
        const auto needs = [&](const StageModules& stage) {
            return quantity >= kEntryStored ? stage.begins_with(kind) : stage.holds(kind);
        };
        if (!every_quantity && std::none_of(modules.begin(), modules.end(), needs)) continue;
        if (quantity == kWeight && division == Division::kOff) continue;
        // Whether a shape is covered at all is read from times.
        bool is_read = quantity == kForward;
        for (size_t at = row; at < extras.size() && !is_read; at += rows.count()) is_read = extras[at] != 0;
        for (const Grid& grid : modes)
            is_read = is_read || holds_more_than_zeros(grid.values, row, rows.count()) ||
                      holds_more_than_zeros(grid.separate, row, rows.count());
        for (const PackedGrid& grid : packed)
            is_read = is_read || (grid.measured() && (holds_more_than_zeros(grid.linear, row, rows.count()) ||
                                                      holds_more_than_zeros(grid.attention, row, rows.count())));
        if (!is_read) continue;
        rows.read.push_back(row);
        if (!counts_labels()) continue;
        const bool is_head = static_cast<int64_t>(kind) == labelled[1];
        const bool is_labelled = is_head || static_cast<int64_t>(kind) == labelled[0];
        const bool is_time = quantity == kForward || quantity == kBackward || quantity == kWeight;
        over_labels.push_back(is_labelled && quantity < kEntryStored);
        scaled_by_labels.push_back(is_labelled && (is_time || (is_head && (quantity == kStored || quantity == kPeak))));
    }
    require(!rows.read.empty(), "a module on some stage");
    for (StageModules& stage : modules) stage.keep_peaks(rows);
}

}  // namespace dynapipe
