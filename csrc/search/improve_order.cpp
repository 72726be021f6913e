#include "search/improve_order.h"

#include <algorithm>
#include <numeric>

#include "checks.h"

namespace dynapipe {
namespace {

constexpr size_t kMostMoved = 20;                // samples moved at once
constexpr size_t kReach = 48;                    // micro-batches on either side that may take them
constexpr int64_t kEvaluationsPerSample = 4000;  // micro-batches costed, so that the time grows with the batch

// Lengths as places among the distinct ones, so that costs are looked up in a table.
struct LengthIndex {
    std::vector<int64_t> distinct;
    std::vector<int32_t> of;  // [samples]

    explicit LengthIndex(const std::vector<int64_t>& lengths) : distinct(lengths) {
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
        for (int64_t length : lengths)
            of.push_back(std::lower_bound(distinct.begin(), distinct.end(), length) - distinct.begin());
    }
};

// Samples that run together, the places of their padded lengths, and the least time in which they do.
struct Group {
    std::vector<int32_t> members;
    int32_t input = 0, target = 0;
    int64_t time = 0;
};

class OrderSearch {
public:
    OrderSearch(const Problem& problem, CostCache& costs, const Lengths& lengths, size_t option,
                const Partition& partition)
        : problem_(problem),
          costs_(costs),
          option_(option),
          warmup_(partition.warmup),
          left_(kEvaluationsPerSample * problem.samples()),
          inputs_(lengths.inputs),
          targets_(lengths.targets),
          times_(inputs_.distinct.size() * targets_.distinct.size()) {
        int32_t sample = 0;
        for (int64_t size : partition.sizes) {
            std::vector<int32_t> members(size);
            std::iota(members.begin(), members.end(), sample);
            sample += size;
            groups_.push_back(measured(std::move(members)));
        }
    }

    std::vector<int64_t> run() {
        for (bool moved = true; moved;) {
            moved = false;
            for (size_t g = 0; g < groups_.size(); ++g)
                for (const LengthIndex* lengths : {&inputs_, &targets_})
                    if (left_ > 0 && relieve(g, *lengths)) moved = true;
        }
        std::vector<int64_t> order;
        for (const Group& group : groups_) order.insert(order.end(), group.members.begin(), group.members.end());
        return order;
    }

private:
    // The least time of a micro-batch over the recompute modes under which it fits.
    int64_t time(size_t size, int32_t input, int32_t target) {
        --left_;
        if (size == 0) return 0;
        std::vector<int64_t>& by_size = times_[input * targets_.distinct.size() + target];
        if (by_size.size() <= size) by_size.resize(size + 8, kUnknown);
        if (by_size[size] == kUnknown)
            by_size[size] = compute(size, inputs_.distinct[input], targets_.distinct[target]);
        return by_size[size];
    }

    int64_t compute(int64_t size, int64_t input, int64_t target) {
        int64_t least = kUnreachable;
        for (size_t mode = 0; mode < problem_.modes.size(); ++mode) {
            CostCache::BySize& by_size = costs_.by_size(mode, input, target);
            if (size > by_size.largest()) continue;
            const Summary& summary = costs_.summary(by_size, size);
            if (summary.options >> option_ & 1 && summary.warmup <= warmup_) least = std::min(least, summary.time);
        }
        return least;
    }

    Group measured(std::vector<int32_t> members) {
        Group group;
        for (int32_t sample : members) {
            group.input = std::max(group.input, inputs_.of[sample]);
            group.target = std::max(group.target, targets_.of[sample]);
        }
        group.time = time(members.size(), group.input, group.target);
        group.members = std::move(members);
        return group;
    }

    int64_t time_with(const Group& group, int32_t sample) {
        return time(group.members.size() + 1, std::max(group.input, inputs_.of[sample]),
                    std::max(group.target, targets_.of[sample]));
    }

    // Moves the fewest longest samples of a micro-batch whose move saves time.
    bool relieve(size_t g, const LengthIndex& lengths) {
        std::vector<int32_t> members = groups_[g].members;
        std::stable_sort(members.begin(), members.end(),
                         [&](int32_t a, int32_t b) { return lengths.of[a] > lengths.of[b]; });
        const size_t most = std::min(kMostMoved, members.size());
        for (size_t moved = 1; moved <= most && left_ > 0; ++moved) {
            if (moved < members.size() && lengths.of[members[moved]] == lengths.of[members[moved - 1]]) continue;
            Group rest = measured({members.begin() + moved, members.end()});
            if (rest.time >= kUnreachable) continue;
            members_.assign(members.begin(), members.begin() + moved);
            if (!place(g, groups_[g].time - rest.time)) continue;
            groups_[g] = std::move(rest);
            return true;
        }
        return false;
    }

    // Puts `members_` of group `from` where each costs least, if all together cost less than `saved`.
    bool place(size_t from, int64_t saved) {
        std::vector<std::pair<size_t, Group>> before;
        const size_t first = from - std::min(from, kReach), last = std::min(groups_.size(), from + kReach + 1);
        for (int32_t sample : members_) {
            size_t receiver = groups_.size();
            int64_t least = saved;
            for (size_t g = first; g < last; ++g) {
                if (g == from || groups_[g].members.empty()) continue;
                const int64_t cost = time_with(groups_[g], sample) - groups_[g].time;
                if (cost < least) {
                    least = cost;
                    receiver = g;
                }
            }
            if (receiver == groups_.size()) {
                for (; !before.empty(); before.pop_back())
                    groups_[before.back().first] = std::move(before.back().second);
                return false;
            }
            Group& group = groups_[receiver];
            before.emplace_back(receiver, group);
            group.members.push_back(sample);
            group.input = std::max(group.input, inputs_.of[sample]);
            group.target = std::max(group.target, targets_.of[sample]);
            group.time += least;
            saved -= least;
        }
        return true;
    }

    static constexpr int64_t kUnknown = -1;

    const Problem& problem_;
    CostCache& costs_;
    const size_t option_;
    const int64_t warmup_;  // no micro-batch may warm up for longer
    int64_t left_;          // evaluations
    const LengthIndex inputs_, targets_;
    std::vector<std::vector<int64_t>> times_;  // [inputs][targets][sizes]
    std::vector<Group> groups_;
    std::vector<int32_t> members_;
};

}  // namespace

std::vector<int64_t> improved_order(const Problem& problem, CostCache& costs, const Lengths& lengths, size_t option,
                                    const Partition& partition) {
    return OrderSearch(problem, costs, lengths, option, partition).run();
}

}  // namespace dynapipe
