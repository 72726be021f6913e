#include "search/partition.h"

#include <algorithm>
#include <numeric>

#include "checks.h"
#include "search/candidates.h"
#include "search/improve_order.h"

namespace dynapipe {
namespace {

// Finds the path of least warmup * replicas + total * chunks; of equal ones, that of the least warmup.
//
// G(F), the least total over edges whose warmup is at most F, never grows with F. So once G(F) is known, any bound
// F' <= F gives at least F' * replicas + G(F) * chunks: ranges of bounds that cannot beat the best known path are
// skipped, and within a range, edges that lie on no path that could.
//
// One shortest path is O(edges): at most samples · largest size · modes. One is found for every range of bounds that
// is not skipped, a few dozen in practice.
class PathSearch {
public:
    PathSearch(const Problem& problem, size_t samples)
        : replicas_(problem.replicas),
          chunks_(problem.chunks()),
          rest_(samples + 1),
          before_(samples + 1),
          choice_(samples) {}

    Partition best(const Graph& graph) {
        best_ = Partition{};
        const int64_t least = least_warmup(graph);
        if (least >= kUnreachable) return best_;
        const Partition free = shortest(graph, kUnreachable);
        offer(free);
        const int64_t step = (free.warmup - least) / kProbes;
        offer(shortest(graph, least + 2 * step));
        const int64_t cheaper = (best_objective() - free.total * chunks_) / replicas_;
        const Graph near = filtered(graph, [&](size_t, const Edge& edge) { return edge.warmup <= cheaper; });
        for (int64_t probe = 1; probe < kProbes; ++probe)  // A good path early makes the bounds tight.
            if (least + probe * step < cheaper) offer(shortest(near, least + probe * step));
        explore(near, least, cheaper);
        return best_;
    }

private:
    static constexpr int64_t kProbes = 8;

    int64_t objective(int64_t warmup, int64_t total) const { return warmup * replicas_ + total * chunks_; }

    int64_t best_objective() const { return objective(best_.warmup, best_.total); }

    void offer(const Partition& partition) {
        if (partition.sizes.empty()) return;
        const int64_t ours = objective(partition.warmup, partition.total), theirs = best_objective();
        if (best_.sizes.empty() || ours < theirs || (ours == theirs && partition.warmup < best_.warmup))
            best_ = partition;
    }

    // Finds whatever path with a warmup from `low` to `high` is better than the best known one.
    void explore(const Graph& graph, int64_t low, int64_t high) {
        const Partition top = shortest(graph, high);
        if (top.sizes.empty()) return;
        offer(top);
        const int64_t cheaper = (best_objective() - top.total * chunks_) / replicas_;
        const int64_t below = std::min(top.warmup - 1, cheaper);
        if (low > below) return;
        reach(graph, high);
        const Graph near = filtered(graph, [&](size_t start, const Edge& edge) {
            const int64_t through = before_[start] + edge.time + rest_[start + edge.size];
            return edge.warmup <= below && through < kUnreachable && objective(low, through) <= best_objective();
        });
        const int64_t middle = low + (below - low) / 2;
        explore(near, low, middle);
        if (middle < below) explore(near, middle + 1, below);
    }

    // The least bound on the warmup under which there is a path.
    int64_t least_warmup(const Graph& graph) {
        rest_.back() = 0;
        for (size_t i = graph.samples(); i-- > 0;) {
            rest_[i] = kUnreachable;
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                const Edge& edge = graph.edges[e];
                rest_[i] = std::min(rest_[i], std::max(edge.warmup, rest_[i + edge.size]));
            }
        }
        return rest_[0];
    }

    // The path of least total time over edges whose warmup is within the bound; no sizes where there is none.
    Partition shortest(const Graph& graph, int64_t bound) {
        rest_.back() = 0;
        for (size_t i = graph.samples(); i-- > 0;) {
            int64_t least = kUnreachable;
            size_t chosen = 0;
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                const Edge& edge = graph.edges[e];
                const int64_t through = edge.time + rest_[i + edge.size];
                if (edge.warmup <= bound && through < least) {
                    least = through;
                    chosen = e;
                }
            }
            rest_[i] = least;
            choice_[i] = chosen;
        }
        Partition partition;
        if (rest_[0] >= kUnreachable) return partition;
        partition.total = rest_[0];
        for (size_t i = 0; i < graph.samples(); i += graph.edges[choice_[i]].size) {
            const Edge& edge = graph.edges[choice_[i]];
            partition.sizes.push_back(edge.size);
            partition.modes.push_back(edge.mode);
            partition.options &= edge.options;
            partition.warmup = std::max(partition.warmup, edge.warmup);
        }
        return partition;
    }

    // The least total from the first sample to every other, over the same edges.
    void reach(const Graph& graph, int64_t bound) {
        std::fill(before_.begin(), before_.end(), kUnreachable);
        before_[0] = 0;
        for (size_t i = 0; i < graph.samples(); ++i) {
            if (before_[i] >= kUnreachable) continue;
            for (size_t e = graph.first[i]; e < graph.first[i + 1]; ++e) {
                const Edge& edge = graph.edges[e];
                if (edge.warmup > bound) continue;
                int64_t& there = before_[i + edge.size];
                there = std::min(there, before_[i] + edge.time);
            }
        }
    }

    const int64_t replicas_, chunks_;
    Partition best_;
    std::vector<int64_t> rest_, before_;  // [samples + 1]: least totals to the end, and from the start
    std::vector<size_t> choice_;
};

constexpr size_t kFewSamples = 2048;          // of which every order is improved
constexpr size_t kMostSamplesAtOnce = 16384;  // of an order that is partitioned whole
constexpr size_t kBlock = 8192;

std::vector<int64_t> taken(const std::vector<int64_t>& values, const std::vector<int64_t>& places) {
    std::vector<int64_t> out;
    out.reserve(places.size());
    for (int64_t place : places) out.push_back(values[place]);
    return out;
}

// An order of the problem's samples, which can be improved and partitioned.
class Order {
public:
    Order(const Problem& problem, CostCache& costs, const std::vector<int64_t>& places)
        : problem_(problem),
          costs_(costs),
          places_(places),
          lengths_{taken(problem.inputs, places), taken(problem.targets, places)} {}

    const std::vector<int64_t>& places() const { return places_; }

    // The best partition for every option of the mask. A large order is partitioned block by block, so that time and
    // memory grow with its length; only micro-batches at the borders of blocks are not the best there are.
    std::vector<Partition> partitions(uint32_t mask) {
        const size_t samples = places_.size();
        if (samples <= kMostSamplesAtOnce) return partitions_of(lengths_, mask);
        std::vector<Partition> joined(problem_.options());
        for (size_t first = 0; first < samples; first += kBlock) {
            const size_t end = std::min(samples, first + kBlock);
            const Lengths block{{lengths_.inputs.begin() + first, lengths_.inputs.begin() + end},
                                {lengths_.targets.begin() + first, lengths_.targets.begin() + end}};
            const std::vector<Partition> found = partitions_of(block, mask);
            for (size_t option = 0; option < joined.size(); ++option)
                if (first == 0 || !joined[option].sizes.empty()) append(joined[option], found[option]);
        }
        return joined;
    }

    Partition partition(size_t option) { return partitions(uint32_t{1} << option)[option]; }

    // For the first option, then for the last.
    void improve() {
        const size_t last = problem_.options() - 1;
        for (size_t option : last > 0 ? std::vector<size_t>{0, last} : std::vector<size_t>{0}) {
            const Partition found = partition(option);
            if (found.sizes.empty()) continue;
            const std::vector<int64_t> improved = improved_order(problem_, costs_, lengths_, option, found);
            places_ = taken(places_, improved);
            lengths_ = {taken(lengths_.inputs, improved), taken(lengths_.targets, improved)};
        }
    }

    // Of the best partition for the last option.
    int64_t objective() {
        const Partition found = partition(problem_.options() - 1);
        if (found.sizes.empty()) return kUnreachable;
        return found.warmup * problem_.replicas + found.total * static_cast<int64_t>(problem_.chunks());
    }

private:
    std::vector<Partition> partitions_of(const Lengths& lengths, uint32_t mask) {
        const Graph graph = candidates(problem_, costs_, lengths, mask);
        PathSearch search(problem_, graph.samples());
        std::vector<Partition> found(problem_.options());
        for (size_t option = found.size(); option-- > 0;) {
            if (!(mask >> option & 1)) continue;
            const auto easier = std::find_if(found.begin() + option + 1, found.end(), [&](const Partition& other) {
                return !other.sizes.empty() && other.options >> option & 1 &&
                       problem_.allows(&other - found.data(), option);
            });
            if (easier != found.end()) {
                found[option] = *easier;  // The best of more candidates is the best of those among which it is.
                continue;
            }
            found[option] =
                search.best(filtered(graph, [&](size_t, const Edge& edge) { return edge.options >> option & 1; }));
        }
        return found;
    }

    // Empty where either is.
    static void append(Partition& joined, const Partition& next) {
        if (next.sizes.empty()) {
            joined = Partition{};
            return;
        }
        joined.sizes.insert(joined.sizes.end(), next.sizes.begin(), next.sizes.end());
        joined.modes.insert(joined.modes.end(), next.modes.begin(), next.modes.end());
        joined.warmup = std::max(joined.warmup, next.warmup);
        joined.total += next.total;
        joined.options &= next.options;
    }

    const Problem& problem_;
    CostCache& costs_;
    std::vector<int64_t> places_;
    Lengths lengths_;
};

}  // namespace

OrderedPartitions best_partitions(const Problem& problem, CostCache& costs,
                                  const std::vector<std::vector<int64_t>>& orders, bool improve) {
    const bool improve_each = improve && problem.samples() <= kFewSamples;
    std::vector<int64_t> best;
    int64_t least = kUnreachable;
    for (const std::vector<int64_t>& places : orders) {
        Order order(problem, costs, places);
        if (improve_each) order.improve();
        const int64_t value = orders.size() > 1 ? order.objective() : 0;
        if (best.empty() || value < least) {
            least = value;
            best = order.places();
        }
    }
    Order order(problem, costs, best);
    if (improve && !improve_each) order.improve();
    return {order.places(), order.partitions(~uint32_t{0})};
}

}  // namespace dynapipe
