// The recompute modes that are worth it for samples of a length.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynapipe {

struct Option {
    size_t mode;
    int64_t time, pressure;  // ns on all stages; memory in flight on the stage that is shortest of it
};

// Those on the lower hull of time over memory, from the one that keeps the least to the fastest.
inline std::vector<Option> lower_hull(std::vector<Option> all) {
    std::vector<Option> hull;
    std::stable_sort(all.begin(), all.end(), [](const Option& a, const Option& b) {
        return a.pressure != b.pressure ? a.pressure < b.pressure : a.time < b.time;
    });
    for (const Option& next : all) {
        if (!hull.empty() && next.time >= hull.back().time) continue;
        while (hull.size() > 1) {  // the last is above the line from the one before it to the next
            const Option &before = hull[hull.size() - 2], &last = hull.back();
            if (static_cast<__int128>(before.time - last.time) * (next.pressure - last.pressure) >
                static_cast<__int128>(last.time - next.time) * (last.pressure - before.pressure))
                break;
            hull.pop_back();
        }
        hull.push_back(next);
    }
    return hull;
}

}  // namespace dynapipe
