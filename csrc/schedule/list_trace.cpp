#include <algorithm>
#include <utility>

#include "schedule/list_schedule.h"

namespace dynapipe {

void ListScheduler::Trace::replace(Trace& before) {
    std::swap_ranges(points_.begin(), points_.begin() + shared_, before.points_.begin());
    std::swap(*this, before);
}

int64_t ListScheduler::Trace::common(const Costs& costs, const Policy& policy,
                                     const std::vector<int32_t>& turned) const {
    if (costs_.empty() || !(policy == policy_) || turned.empty() != turned_.empty()) return 0;
    const auto alike = [](const auto& a, const auto& b) {
        return std::mismatch(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin()).first - a.begin();
    };
    int64_t common = alike(costs, costs_);
    if (turned.empty()) return common;
    const size_t same = alike(turned, turned_);
    common = std::min<int64_t>(common, same);
    for (const auto* each : {&turned, &turned_})  // whose backwards are elsewhere
        for (size_t place = same; place < each->size(); ++place) common = std::min<int64_t>(common, (*each)[place]);
    return common;
}

void ListScheduler::Trace::begin(size_t shared) {
    costs_.clear();
    used_ = shared_ = shared;
    if (points_.size() < used_) points_.resize(used_);
}

void ListScheduler::mark(Trace& trace) const {
    if (trace.used_ == trace.points_.size()) trace.points_.emplace_back();
    Point& point = trace.points_[trace.used_++];
    point.stages = stages_;
    point.starts = starts_;
    point.makespan = makespan_;
}

void ListScheduler::keep(Trace& trace, const Costs& costs, const Policy& policy) {
    trace.costs_ = costs;
    trace.policy_ = policy;
    trace.turned_ = turned_;
    trace.above_ = above_;
    trace.messages_ = messages_;
    trace.inputs_.swap(inputs_);
    trace.gradients_.swap(gradients_);
}

}  // namespace dynapipe
