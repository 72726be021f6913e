#include "search/orchestrate.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "checks.h"

namespace dynapipe {
namespace {

constexpr int64_t kNothingDropped = int64_t{1} << 61;
constexpr int64_t kSpare = 16;        // plans beyond those asked for before the best are kept
constexpr int64_t kAlike = 3;         // labels with the same layers done and devices left that a beam holds at most
constexpr size_t kChildren = 400000;  // of one level, before they are thinned
constexpr size_t kThinned = 4;        // to the 4th of them
constexpr size_t kSorted = 8;         // times as many as are kept, since few that are alike are

struct Label {
    int64_t parent, layer, state, placement;
    int64_t start, forward, backward, transfer;  // of its stage: arrival of the first unit, one unit's passes
    int64_t drain;                               // from its last backward's end to the iteration's end, at least
    int64_t block;                               // the busiest stage or link so far, per unit
    int64_t bound, estimate;

    auto key() const { return std::tie(estimate, bound, layer, state, placement, parent); }
    bool operator<(const Label& other) const { return key() < other.key(); }
};

class Search {
public:
    Search(const OrchestrateProblem& problem, int64_t incumbent, int64_t beam, int64_t most)
        : p_(problem), width_(problem.layers + 1), incumbent_(incumbent), beam_(beam), most_(most) {
        found_.dropped_bound = kNothingDropped;
        least_work_.assign(width_, 0);
        for (int64_t l = p_.layers - 1; l >= 0; --l) {
            double least = 1e30;
            for (int64_t r = 1; r <= p_.most_replicas; ++r)
                least = std::min(least, double(r) * double(of(p_.forward, r, l, l + 1) + of(p_.backward, r, l, l + 1)));
            least_work_[l] = least_work_[l + 1] + least;
        }
    }

    Orchestrated run() {
        expand(-1);
        size_t begin = 0;
        while (!children_.empty()) {
            thin(beam_);
            begin = labels_.size();
            labels_.insert(labels_.end(), children_.begin(), children_.end());
            children_.clear();
            const size_t end = labels_.size();
            for (size_t at = begin; at < end; ++at) expand(at);
        }
        finish();
        return std::move(found_);
    }

private:
    int64_t of(const std::vector<int64_t>& cumulative, int64_t r, int64_t i, int64_t j) const {
        return cumulative[r * width_ + j] - cumulative[r * width_ + i];
    }

    void drop(int64_t bound) { found_.dropped_bound = std::min(found_.dropped_bound, bound); }

    // Every stage that may follow the label's; the first stages for -1.
    void expand(int64_t at) {
        const int64_t layer = at < 0 ? 0 : labels_[at].layer, state = at < 0 ? 0 : labels_[at].state;
        for (int64_t c = p_.first_choice[state]; c < p_.first_choice[state + 1]; ++c) {
            const int64_t placement = p_.choice_placement[c], after = p_.choice_state[c];
            if (p_.replicas[placement] > p_.most_replicas) continue;
            int64_t transfer = 0;
            if (at >= 0) {
                const int64_t pair = labels_[at].placement * p_.placements() + placement;
                transfer =
                    std::nearbyint(p_.transfer_latency[pair] + p_.transfer_rate[pair] * p_.boundary_bytes[layer]);
            }
            for (int64_t end = layer + 1; end <= p_.layers; ++end) {
                if (end < p_.layers && p_.free_devices[after] == 0) continue;
                if (!add(at, layer, end, placement, after, transfer)) break;
            }
        }
    }

    // False if longer stages do not fit either.
    bool add(int64_t at, int64_t layer, int64_t end, int64_t placement, int64_t after, int64_t transfer) {
        const int64_t r = p_.replicas[placement], units = p_.units;
        if (p_.state_bytes[end] - p_.state_bytes[layer] + of(p_.stored, r, layer, end) > p_.memory_limit) return false;
        const Label* before = at < 0 ? nullptr : &labels_[at];
        Label label{};
        label.parent = at;
        label.layer = end;
        label.state = after;
        label.placement = placement;
        label.transfer = transfer;
        label.forward = of(p_.forward, r, layer, end);
        label.backward = of(p_.backward, r, layer, end);
        const double parameters = p_.parameter_bytes[end] - p_.parameter_bytes[layer];
        label.drain = std::nearbyint(p_.reduce_latency[placement] + p_.reduce_rate[placement] * parameters);
        const int64_t both = label.forward + label.backward;
        label.block = std::max(both, transfer);
        if (before) {
            label.start = before->start + before->forward + transfer;
            label.drain = std::max(label.drain, transfer + before->backward + before->drain);
            label.block = std::max(label.block, before->block);
            label.bound = before->bound;
            // The link's queue, downstream and upstream.
            label.bound = std::max(label.bound, label.start + (units - 1) * transfer + both + label.drain);
            label.bound =
                std::max(label.bound, label.start + both + units * transfer + before->backward + before->drain);
        }
        label.bound = std::max(label.bound, label.start + units * both + label.drain);
        const int64_t out = label.start + both + label.drain;
        int64_t rest = 0;
        if (end < p_.layers) {
            rest = static_cast<int64_t>(least_work_[end] / double(p_.free_devices[after]));
            label.bound = std::max(label.bound, out + units * rest);
        }
        label.estimate = std::max(label.bound, out + rest + (units - 1) * std::max(label.block, rest));
        if (label.bound >= incumbent_) return true;
        if (end == p_.layers) {
            complete(label);
        } else {
            children_.push_back(label);
            if (children_.size() > kChildren) thin(kChildren / kThinned);
        }
        return true;
    }

    // A whole plan: its bound with what the stages wait for between warm-up and first gradient.
    void complete(Label label) {
        OrchestratedPlan plan;
        std::vector<const Label*> stages{&label};
        while (stages.back()->parent >= 0) stages.push_back(&labels_[stages.back()->parent]);
        int64_t round_trip = 0;  // of a unit, from the end of a stage's forward to the start of its backward
        for (size_t behind = 0; behind < stages.size(); ++behind) {
            const Label& stage = *stages[behind];
            const int64_t warm_up = std::min<int64_t>(p_.units, behind + 1);
            const int64_t first = std::max(warm_up * stage.forward, stage.forward + round_trip);
            const int64_t then = (p_.units - warm_up) * stage.forward + p_.units * stage.backward;
            label.bound = std::max(label.bound, stage.start + first + then + stage.drain);
            round_trip += stage.forward + stage.backward + 2 * stage.transfer;
            plan.ends.push_back(stage.layer);
            plan.placements.push_back(stage.placement);
        }
        if (label.bound >= incumbent_) return;
        std::reverse(plan.ends.begin(), plan.ends.end());
        std::reverse(plan.placements.begin(), plan.placements.end());
        plan.bound = label.bound;
        plan.estimate = std::max(label.bound, label.estimate);
        found_.plans.push_back(std::move(plan));
        if (found_.plans.size() >= static_cast<size_t>(kThinned * most_ + kSpare)) finish();
    }

    // Keep the best plans.
    void finish() {
        std::stable_sort(found_.plans.begin(), found_.plans.end(), [](const auto& a, const auto& b) {
            return std::tie(a.estimate, a.bound, a.ends, a.placements) <
                   std::tie(b.estimate, b.bound, b.ends, b.placements);
        });
        while (found_.plans.size() > static_cast<size_t>(most_)) {
            drop(found_.plans.back().bound);
            found_.plans.pop_back();
        }
    }

    // Keep the best children, and few that are alike.
    void thin(size_t keep) {
        if (children_.size() <= keep) return;
        const size_t sorted = std::min(children_.size(), kSorted * keep);
        if (sorted < children_.size()) std::nth_element(children_.begin(), children_.begin() + sorted, children_.end());
        std::sort(children_.begin(), children_.begin() + sorted);
        std::vector<int64_t> alike(width_ * p_.free_devices.size(), 0);
        std::vector<Label> kept;
        for (size_t i = 0; i < children_.size(); ++i) {
            Label& child = children_[i];
            if (i < sorted && kept.size() < keep &&
                alike[child.layer * p_.free_devices.size() + child.state]++ < kAlike)
                kept.push_back(child);
            else
                drop(child.bound);
        }
        children_ = std::move(kept);
    }

    const OrchestrateProblem& p_;
    const int64_t width_, incumbent_, beam_, most_;
    std::vector<double> least_work_;  // device-ns of a unit from a layer on, at least
    std::vector<Label> labels_, children_;
    Orchestrated found_;
};

}  // namespace

void OrchestrateProblem::check() const {
    const size_t width = layers + 1, rows = (most_replicas + 1) * width, pairs = replicas.size() * replicas.size();
    require(layers >= 1 && units >= 1 && most_replicas >= 1, "at least one layer, unit and replica");
    require(forward.size() == rows && backward.size() == rows && stored.size() == rows, "costs of every slice");
    require(boundary_bytes.size() == width && parameter_bytes.size() == width && state_bytes.size() == width,
            "sizes of every layer");
    require(reduce_latency.size() == replicas.size() && reduce_rate.size() == replicas.size(),
            "reductions of every placement");
    require(transfer_latency.size() == pairs && transfer_rate.size() == pairs, "transfers of every pair of placements");
    require(first_choice.size() == free_devices.size() + 1 && choice_placement.size() == choice_state.size(),
            "choices of every state");
    for (size_t i = 0; i + 1 < first_choice.size(); ++i)
        require(0 <= first_choice[i] && first_choice[i] <= first_choice[i + 1], "choices in order");
    require(first_choice.back() == static_cast<int64_t>(choice_state.size()), "choices in order");
    for (size_t i = 0; i < choice_state.size(); ++i) {
        require(choice_placement[i] >= 0 && choice_placement[i] < placements(), "placements that there are");
        require(choice_state[i] >= 0 && choice_state[i] < static_cast<int64_t>(free_devices.size()),
                "states that there are");
    }
}

Orchestrated orchestrate(const OrchestrateProblem& problem, int64_t incumbent, int64_t beam, int64_t most) {
    problem.check();
    return Search(problem, incumbent, beam, most).run();
}

}  // namespace dynapipe
