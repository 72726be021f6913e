#include "search/tight_starts.h"

#include <algorithm>

#include "costs/memory.h"

namespace dynapipe {

MicroBatches lighter(const Problem& problem, BatchMaker& maker, MicroBatches batches, size_t fastest) {
    const PipelineShape& shape = problem.pipeline;
    std::vector<int64_t> received(problem.stages(), 0), sent = received;
    const auto for_stages = [&](auto visit) {
        for (int64_t v = 0; v < shape.virtual_stages(); ++v) visit(v, v % shape.stages);
    };
    for (const MicroBatch* batch : batches)
        for_stages([&](int64_t v, int64_t s) {
            const PassCosts costs = batch->costs();
            const int64_t messages = 2 * input_message(costs, v) + 2 * gradient_message(shape, costs, v);
            received[s] = std::max(received[s], messages);
            const int64_t sends = shape.forward_only ? kSentAhead : 1;
            sent[s] = std::max(sent[s], sends * sent_message(shape, batch->costs(), v));
        });
    const auto fit = [&](const MicroBatch* batch) {
        std::vector<int64_t> held(problem.stages(), 0), above = held;
        for_stages([&](int64_t v, int64_t s) {
            held[s] += batch->costs()(kStoredBytes, v);
            above[s] = std::max(above[s], batch->costs()(kPeakBytes, v) - batch->costs()(kStoredBytes, v));
        });
        bool fits = true;
        for (int64_t s = 0; s < shape.stages; ++s)
            fits &= held[s] + above[s] + received[s] + sent[s] <= problem.memory(s);
        return fits;
    };
    for (const MicroBatch*& batch : batches) {
        const MicroBatch* const given = batch;
        for (size_t mode = std::max<size_t>(given->modes[0], fastest); mode < problem.modes.size(); ++mode) {
            if (const MicroBatch* next = maker.make(given->samples, mode, given->packed)) batch = next;
            if (fit(batch)) break;
        }
    }
    return batches;
}

MicroBatches alone(const Problem& problem, BatchMaker& maker) {
    MicroBatches batches;
    for (size_t i = 0; i < maker.samples(); ++i) {
        const MicroBatch* batch = nullptr;
        for (bool packed : {false, true})
            for (size_t mode = 0; !batch && mode < problem.modes.size(); ++mode)
                if (packed ? problem.may_pack : problem.may_pad)
                    batch = maker.make({static_cast<int32_t>(i)}, mode, packed);
        if (!batch) return {};
        batches.push_back(batch);
    }
    return batches;
}

Blocks neediest_first(const Problem& problem, Blocks blocks) {
    const auto need = [&](const MicroBatches& block) {
        int64_t most = -kUnreachable;
        for (const MicroBatch* batch : block)
            for (int64_t v = 0; v < problem.pipeline.virtual_stages(); ++v)
                most = std::max(most, batch->costs()(kPeakBytes, v) - problem.memory(v % problem.pipeline.stages));
        return most;
    };
    std::stable_sort(blocks.begin(), blocks.end(),
                     [&](const MicroBatches& a, const MicroBatches& b) { return need(a) > need(b); });
    return blocks;
}

}  // namespace dynapipe
