#include "blocks.h"

#include <algorithm>
#include <utility>

namespace dynapipe {

int64_t work_of(const MicroBatches& block) {
    int64_t work = 0;
    for (const MicroBatch* batch : block) work += batch->work;
    return work;
}

MicroBatches joined(const Blocks& blocks) {
    MicroBatches order;
    for (const MicroBatches& block : blocks) order.insert(order.end(), block.begin(), block.end());
    return order;
}

Blocks hill(const Blocks& blocks) {
    Blocks order;
    for (size_t i = blocks.size(); i-- > 0;)
        if (i % 2 == 0) order.push_back(blocks[i]);
    for (size_t i = 1; i < blocks.size(); i += 2) order.push_back(blocks[i]);
    return order;
}

Blocks merged_hills(const Blocks& blocks, size_t modes) {
    std::vector<std::pair<int64_t, const MicroBatches*>> placed;  // (place in 2^20ths, block)
    std::vector<Blocks> hills;
    for (size_t mode = 0; mode < modes; ++mode) {
        Blocks its;
        for (const MicroBatches& block : blocks)
            if (block[0]->mode == mode) its.push_back(block);
        hills.push_back(hill(its));
    }
    for (const Blocks& order : hills)
        for (size_t i = 0; i < order.size(); ++i)
            placed.emplace_back(static_cast<int64_t>((2 * i + 1) << 20) / static_cast<int64_t>(order.size()), &order[i]);
    std::stable_sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    Blocks order;
    for (const auto& [place, block] : placed) order.push_back(*block);
    return order;
}

}  // namespace dynapipe
