// Costs of micro-batches by shape and recompute mode, found when first asked for.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "search.h"

namespace dynapipe {

class ShapeCosts {
public:
    explicit ShapeCosts(const SearchProblem& problem) : problem_(problem), knots_(problem.modes.size()) {}

    // Null where the micro-batch lies outside the cost model or does not fit beside the model state. What is returned
    // lives as long as this object.
    const PassCosts* at(const MicroBatch& batch);

private:
    struct Entry {
        std::vector<int64_t> values;
        PassCosts costs;
        bool usable = false;
    };

    void compute(const MicroBatch& batch, int64_t input, int64_t target, Entry& entry);
    int64_t transfer(int64_t boundary, int64_t bytes) const;

    const SearchProblem& problem_;
    std::vector<std::unordered_map<uint64_t, std::vector<int64_t>>> knots_;  // [modes]{lengths}
    std::unordered_map<uint64_t, std::unordered_map<int64_t, Entry>> entries_;
};

}  // namespace dynapipe
