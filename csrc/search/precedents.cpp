#include "search/precedents.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "search/packed_starts.h"

namespace dynapipe {
namespace {

constexpr int64_t kParts = int64_t{1} << 30;  // of all positions
constexpr int64_t kMillion = 1'000'000;
constexpr size_t kRowsCompared = 16;  // where a sample may go

struct Positions {
    int64_t inputs = 0, targets = 0;

    int64_t sum() const { return inputs + targets; }
    void add(const Positions& other, int64_t times) {
        inputs += times * other.inputs;
        targets += times * other.targets;
    }
    // In parts of all.
    Positions of(const Positions& all) const {
        return {inputs * kParts / std::max<int64_t>(all.inputs, 1),
                targets * kParts / std::max<int64_t>(all.targets, 1)};
    }
};

Positions total(const std::vector<Positions>& each) {
    Positions all;
    for (const Positions& one : each) all.add(one, 1);
    return all;
}

// Of the rows with the most room, the one whose scarcer kind of room a sample leaves largest.
using ByRoom = std::set<std::pair<int64_t, size_t>>;  // (less than none, row)
ByRoom::iterator roomiest(const ByRoom& by_room, const std::vector<Positions>& room, const Positions& sample) {
    auto chosen = by_room.begin();
    std::pair most{-kUnreachable, -kUnreachable};
    size_t compared = 0;
    for (auto row = by_room.begin(); row != by_room.end() && compared < kRowsCompared; ++row, ++compared) {
        Positions left = room[row->second];
        left.add(sample, -1);
        const std::pair its{std::min(left.inputs, left.targets), left.sum()};
        if (its <= most) continue;
        most = its;
        chosen = row;
    }
    return chosen;
}

// Samples of every row, as places in the order.
std::vector<std::vector<int32_t>> filled(const std::vector<Positions>& samples, const std::vector<Positions>& of_rows) {
    const Positions all = total(samples), all_rows = total(of_rows);
    std::vector<int32_t> order(samples.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return samples[a].sum() > samples[b].sum(); });
    std::vector<Positions> room;  // in parts of all
    ByRoom by_room;
    for (const Positions& row : of_rows) {
        room.push_back(row.of(all_rows));
        by_room.emplace(-room.back().sum(), room.size() - 1);
    }
    std::vector<std::vector<int32_t>> rows(of_rows.size());
    for (int32_t place : order) {
        const Positions its = samples[place].of(all);
        const auto chosen = roomiest(by_room, room, its);
        const size_t row = chosen->second;
        by_room.erase(chosen);
        room[row].add(its, -1);
        by_room.emplace(-room[row].sum(), row);
        rows[row].push_back(place);
    }
    for (std::vector<int32_t>& row : rows) std::sort(row.begin(), row.end());
    return rows;
}

// The micro-batches of every replica; none where a row cannot run, or a replica has none.
std::vector<MicroBatches> followed(const std::vector<Positions>& samples, const Precedent& precedent,
                                   const Problem& problem, BatchMaker& maker) {
    std::vector<Positions> room;
    for (const Precedent::Row& row : precedent.rows) room.push_back({row.inputs, row.targets});
    const std::vector<std::vector<int32_t>> rows = filled(samples, room);
    std::vector<MicroBatches> replicas(problem.replicas);
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].empty()) continue;
        const MicroBatch* made = maker.make(rows[i], precedent.rows[i].modes, true);
        if (!made || precedent.rows[i].replica >= problem.replicas) return {};
        replicas[precedent.rows[i].replica].push_back(made);
    }
    for (const MicroBatches& replica : replicas)
        if (replica.empty()) return {};
    return replicas;
}

}  // namespace

Followed follow_precedents(const Problem& problem, CostCache& costs, BatchMaker& maker) {
    const auto has_rows = [](const Precedent& precedent) { return !precedent.rows.empty(); };
    if (std::none_of(problem.precedents.begin(), problem.precedents.end(), has_rows)) return {};
    if (problem.is_cut() || !problem.may_pack) return {};
    const int64_t estimate = estimated_ns(problem, costs, maker);
    if (estimate >= kUnreachable) return {};
    std::vector<Positions> samples;
    for (size_t place = 0; place < maker.samples(); ++place) {
        const int32_t sample = maker.sample(place);
        samples.push_back({problem.input_positions[sample], problem.target_positions[sample]});
    }
    Followed found;
    int64_t least = kUnreachable;
    for (const Precedent& precedent : problem.precedents) {
        least = std::min(least, precedent.over_estimate);
        if (!has_rows(precedent)) continue;
        std::vector<MicroBatches> replicas = followed(samples, precedent, problem, maker);
        if (!replicas.empty()) found.plans.push_back(std::move(replicas));
    }
    found.expected = static_cast<int64_t>(static_cast<__int128>(estimate) * least / kMillion);
    return found;
}

}  // namespace dynapipe
