// One batch to be planned: its samples, the costs of layers, the pipeline, and the links between its stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline.h"
#include "tables.h"

namespace dynapipe {

// What crosses the boundary v → v + 1 and how long it takes: [virtual stages - 1] each.
struct Links {
    int64_t bytes_per_position;            // of one hidden state
    std::vector<uint8_t> decoder_forward;  // whether activations hold the decoder's state
    std::vector<uint8_t> decoder_backward;
    std::vector<double> latency_ns, gbps;  // [routes][virtual stages - 1]: a message takes the fastest route

    int64_t transfer_ns(size_t boundary, int64_t bytes) const;
    void check(size_t virtual_stages) const;
};

// Of a layer's parts (cost/division.py): by position attention's linears and the MLP, by position and key attention's inside,
// of forward times, backward times, and stored bytes of attention and of the MLP, each against the rest of the layer's; peaks
// of both in bytes / kPeakUnit and, once, in bytes (all 0: the layer's); thousandths of the linears' forward that weight
// gradients take.
enum PartRate { kLinear, kInner, kMlp, kAttentionPeak = 12, kAttentionPeakInner, kAttentionPeakOnce, kMlpPeak, kMlpPeakOnce,
                kWeightPerMille, kPartRates };
constexpr int kOfForward = 0, kOfBackward = 3, kOfAttentionStored = 6, kOfMlpStored = 9;
constexpr int64_t kPeakUnit = 64;

enum class Division { kOff, kAuto, kOn, kDivisions };  // of backward passes: where that is faster, or all that can be

struct Problem {
    std::vector<int64_t> inputs, targets;                    // [samples] padded lengths
    std::vector<int64_t> input_positions, target_positions;  // [samples] without padding
    bool may_pad, may_pack;                                  // layouts of micro-batches that may be made
    std::vector<Grid> modes;                                 // one layer's costs under each recompute mode
    std::vector<PackedGrid> packed;                          // [modes] those of packed rows, where measured
    std::vector<StageLayers> layers;       // [virtual stages]
    PipelineShape pipeline;
    Links links;
    std::vector<int64_t> in_flight;  // [options][stages] micro-batches that a stage holds at once
    int64_t replicas;
    Division division;
    static constexpr int64_t row_multiple = 8;  // positions of packed rows are rounded up to it
    // Where samples are cut: a sample of the problem may be a piece of one. The pieces of a chain follow one another.
    std::vector<int32_t> chains;  // [samples] the chain that it is a piece of, -1 for a whole one; empty where none is cut
    std::vector<int64_t> extras;  // [modes][samples][kEncoderRows] what a piece costs one layer besides its share
    std::vector<int64_t> part_rates;  // [modes][kPartRates] how the costs of a row with pieces are divided
    int rows = kWholeRows;        // of a layer's costs that are read: kRows where a layer is divided

    bool is_cut() const { return !chains.empty(); }
    bool is_piece(int32_t sample) const { return is_cut() && chains[sample] >= 0; }

    size_t samples() const { return inputs.size(); }
    size_t stages() const { return pipeline.stages; }
    size_t chunks() const { return pipeline.chunks; }
    size_t options() const { return in_flight.size() / stages(); }
    int64_t memory(size_t stage) const { return pipeline.memory_limit - pipeline.model_state[stage]; }
    // Whether whatever fits with `other` in flight fits with `option`.
    bool allows(size_t option, size_t other) const;
    void check() const;

private:
    void check_chains() const;
};

}  // namespace dynapipe
