#include "search/row_sizes.h"

#include <map>
#include <numeric>
#include <tuple>

namespace dynapipe {
namespace {

constexpr int64_t kSmallestRow = 64,
                  kLeastRows = 4;  // of a replica; smaller rows than these only where batches are small

}  // namespace

RowSizes::RowSizes(const Problem& problem, CostCache& costs, const BatchMaker& maker)
    : problem_(problem), costs_(costs), in_flight_(problem.stages()), samples_(maker) {
    for (size_t stage = 0; stage < problem.stages(); ++stage)
        in_flight_[stage] = static_cast<int64_t>((problem.stages() - stage) * problem.chunks());
    for (size_t i = 0; i < maker.samples(); ++i) {
        const int32_t sample = maker.sample(i);
        positions_.push_back(problem.input_positions[sample] + problem.target_positions[sample]);
        total_ += positions_.back();
    }
    classify();
}

void RowSizes::classify() {
    std::map<std::tuple<int64_t, int64_t, int64_t>, int32_t> of_lengths;
    for (size_t i = 0; i < positions_.size(); ++i) {
        const int32_t sample = samples_.sample(i);
        const std::tuple its{problem_.input_positions[sample], problem_.target_positions[sample],
                             problem_.counts_labels() ? problem_.labels[sample] : 0};
        const int32_t next = classes_.size();
        const int32_t of_class = is_piece(i) ? next : of_lengths.try_emplace(its, next).first->second;
        if (of_class == next) classes_.push_back({sample, {}});
        classes_[of_class].members.push_back(i);
        class_of_.push_back(of_class);
    }
}

// Work of the busiest stage and one row on all stages, of one chunk, at so many rows to a replica: with the first mode
// that covers a sample, or with the last as far as memory asks for it; kUnreachable where none does.
int64_t RowSizes::estimate(int64_t size, int64_t rows) {
    const size_t stages = problem_.stages(), modes = problem_.modes.size();
    std::vector<Share> fast(stages, Share{0, 0, 0}), light = fast, first, last;  // of all samples: [stages]
    const auto covers = [&](size_t mode, const LengthClass& samples, std::vector<Share>& its) {
        return samples_.freedom().allows(mode) && costs_.shares(mode, samples.sample, size, its);
    };
    for (const LengthClass& samples : classes_) {
        size_t mode = 0;
        while (mode < modes && !covers(mode, samples, first)) ++mode;
        if (mode == modes) return kUnreachable;
        if (mode + 1 == modes || !covers(modes - 1, samples, last)) last = first;
        const auto count = static_cast<int64_t>(samples.members.size());
        for (size_t v = 0; v < problem_.modules.size(); ++v)
            for (const auto& [all, of] : {std::pair(&fast, &first), std::pair(&light, &last)}) {
                const Share& its = (*of)[costs_.type_of()[v]];
                (*all)[v % stages].forward += time(its) * count;
                (*all)[v % stages].stored += its.stored / kScale * count;
            }
    }
    int64_t part = kScale;  // of the work, under the fastest mode; pieces are held until their sample's last has run
    for (size_t s = 0; s < stages && !problem_.pipeline.forward_only && !problem_.is_cut(); ++s) {
        const int64_t held = std::min(in_flight_[s], rows), of = rows * problem_.replicas;
        const int64_t more = (fast[s].stored - light[s].stored) / of * held;
        const int64_t left = std::max<int64_t>(room(s) - light[s].stored / of * held, 0);
        if (more > left) part = std::min(part, left * kScale / more);
    }
    int64_t sum = 0, most = 0;
    for (size_t s = 0; s < stages; ++s) {
        const int64_t of_stage = light[s].forward + (fast[s].forward - light[s].forward) / kScale * part;
        sum += of_stage;
        most = std::max(most, of_stage);
    }
    return most / problem_.replicas + sum / (problem_.replicas * rows * static_cast<int64_t>(problem_.chunks()));
}

// (estimate, size) of rows, those that promise the most first: large enough for the kernels, small enough for the
// pipeline.
std::vector<std::pair<int64_t, int64_t>> RowSizes::estimates() {
    std::vector<int32_t> every(positions_.size());
    std::iota(every.begin(), every.end(), 0);
    std::vector<std::pair<int64_t, int64_t>> estimated;  // (estimate, size)
    int64_t power = kSmallestRow;
    while (power > 1 && power * problem_.replicas * kLeastRows > total_) power /= 2;
    smallest_ = power;
    for (; power == 1 || power * problem_.replicas <= total_; power *= 2) {
        const int64_t rows = rows_of(every, power) / problem_.replicas;
        if (rows > 0) estimated.emplace_back(estimate(power, rows), power);
    }
    std::sort(estimated.begin(), estimated.end());
    return estimated;
}

std::vector<int64_t> RowSizes::sizes() {
    const std::vector<std::pair<int64_t, int64_t>> estimated = estimates();
    if (estimated.empty()) return {smallest_};  // a long sample beside few short ones: `rows` adds what replicas lack
    std::vector<int64_t> sizes;
    for (const auto& [_, size] : estimated) sizes.push_back(size);
    return sizes;
}

// The fewest rows of a replica of which a pipeline holds as many as fill it under one mode, by what they keep in rows
// of `size`; 0 where one of the samples cannot run under it.
int64_t RowSizes::fewest_under(size_t mode, int64_t size) {
    std::vector<int64_t> stored(problem_.stages(), 0);
    std::vector<Share> its;
    for (const LengthClass& samples : classes_) {
        if (!costs_.shares(mode, samples.sample, size, its)) return 0;
        for (size_t v = 0; v < problem_.modules.size(); ++v)
            stored[v % problem_.stages()] +=
                its[costs_.type_of()[v]].stored / kScale * static_cast<int64_t>(samples.members.size());
    }
    int64_t fewest = 1;
    for (size_t s = 0; s < problem_.stages(); ++s) {
        const int64_t all = stored[s] / problem_.replicas;
        if (all > room(s)) fewest = std::max(fewest, all * in_flight_[s] / room(s) + 1);
    }
    return fewest;
}

}  // namespace dynapipe
