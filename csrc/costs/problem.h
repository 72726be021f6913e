// One batch to be planned: its samples, the costs of layers, the pipeline, and the links between its stages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "checks.h"
#include "costs/pipeline.h"
#include "costs/tables.h"

namespace dynapipe {

// What crosses the boundary v → v + 1 and how long it takes: [virtual stages - 1] each.
struct Links {
    int64_t bytes_per_position;            // of one hidden state, as it is sent
    int64_t held_per_position;             // bytes of it that a rank holds
    std::vector<uint8_t> decoder_forward;  // whether activations hold the decoder's state
    std::vector<uint8_t> decoder_backward;
    std::vector<double> latency_ns, gbps;  // [routes][virtual stages - 1]: a message takes the fastest route

    int64_t transfer_ns(size_t boundary, int64_t bytes) const;
    int64_t held_bytes(int64_t positions) const { return std::min(positions * held_per_position, kLargestMessage); }
    void check(size_t virtual_stages) const;
};

// The rows of another batch's plan, of all replicas, in the order in which they enter the pipeline.
struct Precedent {
    struct Row {
        int64_t replica, inputs, targets;  // positions
        std::vector<uint8_t> modes;        // [virtual stages]
    };
    int64_t over_estimate;  // the plan's time over what its batch was estimated to take, in millionths
    std::vector<Row> rows;  // none where other batches cannot follow it
};

enum class Division { kOff, kAuto, kOn, kDivisions };  // of backward passes: where that is faster, or all that can be

struct Problem {
    std::vector<int64_t> inputs, targets;                    // [samples] padded lengths
    std::vector<int64_t> input_positions, target_positions;  // [samples] without padding
    bool may_pad, may_pack;                                  // layouts of micro-batches that may be made
    std::vector<Grid> modes;                                 // modules' costs under each recompute mode
    std::vector<PackedGrid> packed;                          // [modes] those of packed rows, where measured
    std::vector<StageModules> modules;                       // [virtual stages]
    bool every_quantity;  // whether costs of modules with which no stage begins are read, too, for other divisions
    bool even_two;        // whether stages have to be even in two kinds of layers, as in an encoder and in a decoder
    PipelineShape pipeline;
    Links links;
    std::vector<int64_t> in_flight;  // [options][stages] micro-batches that a stage holds at once
    int64_t replicas;
    Division division;
    int64_t row_multiple;  // positions of packed rows are rounded up to it
    std::vector<Precedent> precedents = {};
    // Where samples are cut: a sample of the problem may be a piece of one. The pieces of a chain follow one another.
    std::vector<int32_t>
        chains;  // [samples] the chain that it is a piece of, -1 for a whole one; empty where none is cut
    // [modes][samples][rows] what a piece, or, where none is cut, a sample costs modules besides; may be empty
    std::vector<int64_t> extras;
    Rows rows = {};
    // Where the last MLP and the head run positions with labels alone.
    std::vector<int64_t> labels = {};    // [samples] how many count; empty where all do
    std::vector<int64_t> labelled = {};  // kinds of that MLP, or -1, and of the head
    // [rows that are read] whether a row is of such positions: in measured packed rows all costs but those of a stage's
    // beginning; in costs derived from padded micro-batches' times, and what the head stores.
    std::vector<uint8_t> over_labels = {}, scaled_by_labels = {};

    bool counts_labels() const { return !labels.empty(); }
    bool is_cut() const { return !chains.empty(); }
    bool is_piece(int32_t sample) const { return is_cut() && chains[sample] >= 0; }
    bool has_extras(int32_t sample) const { return !extras.empty() && (!is_cut() || is_piece(sample)); }

    size_t samples() const { return inputs.size(); }
    size_t stages() const { return pipeline.stages; }
    size_t chunks() const { return pipeline.chunks; }
    size_t options() const { return in_flight.size() / stages(); }
    int64_t memory(size_t stage) const { return pipeline.memory_limit - pipeline.model_state[stage]; }
    // Whether whatever fits with `other` in flight fits with `option`.
    bool allows(size_t option, size_t other) const;
    void check() const;
    void choose_rows();  // those that the stages need

private:
    void check_chains() const;
};

}  // namespace dynapipe
