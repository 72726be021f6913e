// Costs of one layer on a grid of micro-batch shapes, and the costs of a stage that follow from them.
// cost/tables.py and cost/stages.py state the same rules, with the same rounding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynapipe {

enum Row { kEncoderForward, kEncoderBackward, kEncoderStored, kEncoderPeak,
           kDecoderForward, kDecoderBackward, kDecoderStored, kDecoderPeak,
           kHeadForward, kHeadBackward, kHeadStored, kHeadPeak, kEncodedStored,
           kEncoderWeight, kDecoderWeight,
           kEncoderAttentionForward, kEncoderAttentionBackward, kEncoderAttentionStored, kEncoderAttentionPeak,
           kEncoderMlpStored, kEncoderMlpPeak, kEncoderAttentionWeight,
           kDecoderAttentionForward, kDecoderAttentionBackward, kDecoderAttentionStored, kDecoderAttentionPeak,
           kDecoderMlpStored, kDecoderMlpPeak, kDecoderAttentionWeight, kRows };

constexpr int kWholeRows = kEncoderAttentionForward;  // the others are of halves of layers, read only where there are any

// A stage's peak is the largest of the three ends and `kStored`.
enum StageRow { kForward, kBackward, kStored, kEncoderEnd, kDecoderEnd, kHeadEnd, kWeight, kStageRows };

constexpr int kEncoderRows = 4;  // the first of `Row`

constexpr int64_t kMostLayers = 65536;  // of a kind on a stage

// A strictly increasing grid axis.
struct Axis {
    std::vector<int64_t> points;

    struct Cell {
        size_t low, high;
        int64_t part, width;
    };

    bool covers(int64_t x) const { return x <= points.back(); }
    Cell cell(int64_t x) const;  // of x clamped to the axis
};

// low + (high - low) * part / width, rounded to the nearest; absent where an end with weight is.
inline int64_t interpolate(int64_t low, int64_t high, int64_t part, int64_t width) {
    if (low < 0 || (part > 0 && high < 0)) return -1;
    if (part == 0) return low;
    const int64_t scaled = (high - low) * part + width / 2;
    if ((width & (width - 1)) == 0) return low + (scaled >> __builtin_ctzll(width));
    const int64_t quotient = scaled / width;
    return low + quotient - (scaled % width < 0);
}

struct Grid {
    Axis sizes, inputs, targets;
    const int64_t* values;    // [kRows][sizes][inputs][targets]
    const int64_t* separate;  // the same, absent from each row by itself
    // Of models whose layers differ: [virtual stages] of such values, of one layer of each stage. Else null.
    const int64_t* of_stages = nullptr;
    int rows = kRows;  // that are read

    // Costs at every size of the grid for given lengths: [kRows][sizes], absent outside, and those that are not read.
    std::vector<int64_t> at_lengths(int64_t input, int64_t target) const { return at(values, input, target); }
    std::vector<int64_t> separately_at_lengths(int64_t input, int64_t target) const {
        return at(separate, input, target);
    }
    std::vector<int64_t> of_stage_at_lengths(size_t stage, int64_t input, int64_t target) const {
        return at(of_stages + stage * kRows * points(), input, target);
    }

    void check(size_t value_count, size_t separate_count) const;
    void check_stages(size_t count, size_t virtual_stages) const;

private:
    bool absent_alike(const int64_t* from, size_t planes) const;
    size_t points() const { return sizes.points.size() * inputs.points.size() * targets.points.size(); }
    std::vector<int64_t> at(const int64_t* from, int64_t input, int64_t target) const;
};

// Costs of one layer in packed rows, where they were measured: a part linear in the row's positions, and the attention
// of each sample.
struct PackedGrid {
    Axis row_inputs, row_targets;  // positions of a row
    const int64_t* linear;         // [kRows][row_inputs][row_targets]
    Axis inputs, targets;          // positions of a sample
    const int64_t* attention;      // [kRows][inputs][targets]
    int rows = kRows;              // that are read

    bool measured() const { return !inputs.points.empty(); }
    // False where positions lie above the grid, or a value is absent.
    bool add_linear(int64_t row_inputs, int64_t row_targets, int64_t (&out)[kRows]) const;
    bool attention_of(int64_t input, int64_t target, int64_t (&out)[kRows]) const;
    void check(size_t linear_count, size_t attention_count) const;
};

// Layers of one kind on a virtual stage, in this order.
struct Layers {
    int64_t mlp;  // 1 where it begins with the MLP of a layer
    int64_t whole;
    int64_t attention;  // 1 where it ends with the attention of one

    bool any() const { return mlp + whole + attention > 0; }
    bool operator==(const Layers& other) const {
        return mlp == other.mlp && whole == other.whole && attention == other.attention;
    }
};

// Layers of one virtual stage.
struct StageLayers {
    Layers encoder, decoder;
    bool head;
    int64_t own = -1;  // the stage whose values its layers have, where layers differ

    bool operator==(const StageLayers& other) const {
        return encoder == other.encoder && decoder == other.decoder && head == other.head && own == other.own;
    }
};

// A stage's costs at every size of the grid, from its layers': [kStageRows][sizes] appended to `out`. A size at which
// a cost is above kLargestCost is absent.
void append_stage_costs(const std::vector<int64_t>& layer_costs, size_t sizes, const StageLayers& layers,
                        std::vector<int64_t>& out);

}  // namespace dynapipe
