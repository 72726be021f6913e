#include "search/lighten.h"

#include <algorithm>

namespace dynapipe {
namespace {

// A mode of a micro-batch on a virtual stage that takes less time than the present one, and how much more it keeps.
struct Upgrade {
    size_t row, v, mode;
    double saved_per_byte;
};

int64_t time_of(const MicroBatch& batch, size_t v) {
    return batch.costs()(kForwardNs, v) + batch.costs()(kBackwardNs, v);
}

// What a pass of a stage needs at most beside what micro-batches keep.
int64_t most_above(const Problem& problem, const MicroBatches& batches, size_t stage) {
    int64_t most = 0;
    for (const MicroBatch* batch : batches)
        for (size_t v = stage; v < problem.modules.size(); v += problem.stages())
            most = std::max(most, batch->costs()(kPeakBytes, v) - batch->costs()(kStoredBytes, v));
    return most;
}

}  // namespace

MicroBatches lightened(const Problem& problem, BatchMaker& maker, const MicroBatches& given, double limit) {
    MicroBatches batches = given;
    const size_t modes = problem.modes.size(), stages = problem.stages(), virtual_stages = problem.modules.size();
    if (modes < 2 || problem.pipeline.forward_only) return batches;
    if (limit > 0)
        for (const MicroBatch*& batch : batches)
            if (const MicroBatch* lightest = maker.make(batch->samples, modes - 1, batch->packed)) batch = lightest;
    std::vector<std::vector<const MicroBatch*>> under(batches.size());  // [micro-batches][modes]
    std::vector<Modes> chosen;
    for (size_t row = 0; row < batches.size(); ++row) {
        for (size_t mode = 0; mode < modes; ++mode)
            under[row].push_back(maker.make(batches[row]->samples, mode, batches[row]->packed));
        chosen.push_back(batches[row]->modes);
    }
    std::vector<double> share(stages);  // of a stage's memory that a byte of a micro-batch of mean size takes
    std::vector<double> full(stages, 0.0);
    for (size_t s = 0; s < stages; ++s) {
        const size_t held = std::min((stages - s) * problem.chunks(), batches.size());
        const int64_t memory = std::max<int64_t>(problem.memory(s), 1);
        share[s] = static_cast<double>(held) / batches.size() / memory;
        if (limit > 0) full[s] = static_cast<double>(most_above(problem, batches, s)) / memory;
    }
    for (const MicroBatch* batch : batches)
        for (size_t v = 0; v < virtual_stages; ++v)
            full[v % stages] += share[v % stages] * batch->costs()(kStoredBytes, v);
    const double most = limit > 0 ? limit : *std::max_element(full.begin(), full.end());
    std::vector<Upgrade> upgrades;
    for (size_t row = 0; row < batches.size(); ++row)
        for (size_t mode = 0; mode < modes; ++mode) {
            const MicroBatch* next = under[row][mode];
            for (size_t v = 0; next && v < virtual_stages; ++v) {
                const int64_t saved = time_of(*batches[row], v) - time_of(*next, v);
                const int64_t kept = next->costs()(kStoredBytes, v) - batches[row]->costs()(kStoredBytes, v);
                if (saved > 0)
                    upgrades.push_back({row, v, mode, static_cast<double>(saved) / std::max<int64_t>(kept, 1)});
            }
        }
    std::stable_sort(upgrades.begin(), upgrades.end(),
                     [](const Upgrade& a, const Upgrade& b) { return a.saved_per_byte > b.saved_per_byte; });
    for (const auto& [row, v, mode, _] : upgrades) {
        const MicroBatch *now = under[row][chosen[row][v]], *next = under[row][mode];
        const double more = share[v % stages] * (next->costs()(kStoredBytes, v) - now->costs()(kStoredBytes, v));
        if (time_of(*next, v) >= time_of(*now, v) || full[v % stages] + more > most) continue;
        full[v % stages] += more;
        chosen[row][v] = mode;
    }
    MicroBatches lighter = batches;
    for (size_t row = 0; row < batches.size(); ++row)
        if (chosen[row] != batches[row]->modes)
            if (const MicroBatch* batch = maker.make(batches[row]->samples, chosen[row], batches[row]->packed))
                lighter[row] = batch;
    return lighter;
}

void keep_more(BatchMaker& maker, MicroBatches& batches, int64_t most,
               const std::function<bool(const MicroBatches&)>& accepts) {
    for (const MicroBatch*& batch : batches) {
        const auto takes = [&](const Modes& modes) {
            if (modes == batch->modes || most-- <= 0) return false;
            const MicroBatch* const present = batch;
            batch = maker.make(present->samples, modes, present->packed);
            if (batch && accepts(batches)) return true;
            batch = present;
            return false;
        };
        if (takes(Modes(batch->modes.size(), 0))) continue;
        for (size_t v = 0; v < batch->modes.size(); ++v)
            for (uint8_t mode = 0; mode < batch->modes[v]; ++mode) {
                Modes modes = batch->modes;
                modes[v] = mode;
                if (takes(modes)) break;
            }
    }
}

}  // namespace dynapipe
