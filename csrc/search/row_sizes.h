// How large packed rows may be to begin a search with: large enough for the kernels, small enough for the pipeline, and
// as large as the memory holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "costs/costs.h"
#include "costs/problem.h"
#include "search/batches.h"

namespace dynapipe {

// Samples of equal lengths, which cost the same; of pieces each is alone.
struct LengthClass {
    int32_t sample;                // one of them, as a place in the problem
    std::vector<int32_t> members;  // places in the order
};

// Times and memory are of samples in rows of a size, from the cache of costs.
class RowSizes {
public:
    using Share = CostCache::Share;

    RowSizes(const Problem& problem, CostCache& costs, const BatchMaker& maker);

    // (estimate, size) of rows, those that promise the most first.
    std::vector<std::pair<int64_t, int64_t>> estimates();

protected:
    static constexpr int64_t kScale = 1024;

    std::vector<int64_t> sizes();
    int64_t fewest_under(size_t mode, int64_t size);

    // Rows of about `size` positions: as many as long samples need, and for the rest.
    int64_t rows_of(const std::vector<int32_t>& samples, int64_t size) const {
        int64_t long_ones = 0, rest = 0;
        for (int32_t sample : samples) {
            if (positions_[sample] >= size)
                ++long_ones;
            else
                rest += positions_[sample];
        }
        return std::clamp<int64_t>(long_ones + (rest + size / 2) / size, 1, samples.size());
    }
    int64_t time(const Share& share) const {
        return share.forward + (problem_.pipeline.forward_only ? 0 : share.backward);
    }
    int64_t room(size_t stage) const { return std::max<int64_t>(problem_.memory(stage), 0) / kScale + 1; }
    bool is_piece(int32_t place) const { return problem_.is_piece(samples_.sample(place)); }

    const Problem& problem_;
    CostCache& costs_;
    std::vector<int64_t> in_flight_, positions_;  // [stages], [samples by place in the order]
    std::vector<LengthClass> classes_;
    std::vector<int32_t> class_of_;  // [samples]
    int64_t total_ = 0;              // positions

private:
    void classify();
    int64_t estimate(int64_t size, int64_t rows);

    const BatchMaker& samples_;
    int64_t smallest_ = 0;
};

}  // namespace dynapipe
