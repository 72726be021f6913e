#include "schedule/reschedule.h"

#include <algorithm>
#include <numeric>

#include "costs/costs.h"
#include "schedule/list_schedule.h"
#include "schedule/policies.h"

namespace dynapipe {
namespace {

// Empty where a stage's costs are above the limit.
std::vector<CostRow> priced(const Links& links, const std::vector<StageModules>& stages, const KnownMicroBatches& known,
                            bool divided) {
    size_t ends = 0;
    for (const StageModules& stage : stages) ends = std::max(ends, stage.ends());
    std::vector<size_t> each_its_own(stages.size());
    std::iota(each_its_own.begin(), each_its_own.end(), size_t{0});
    const size_t width = known.modules * kQuantities;
    std::vector<CostRow> rows(known.count());
    std::vector<int64_t> by_stage;
    for (size_t i = 0; i < known.count(); ++i) {
        const auto values = known.values.subspan(i * width, width);
        const std::vector<int64_t> module_costs(values.begin(), values.end());
        by_stage.clear();
        for (const StageModules& stage : stages)
            if (!append_stage(stage, module_costs, ends, by_stage)) return {};
        set_costs(rows[i], by_stage, each_its_own, links, known.inputs[i], known.targets[i], divided);
    }
    return rows;
}

}  // namespace

int64_t reschedule(const PipelineShape& shape, const Links& links, const std::vector<StageModules>& stages,
                   const KnownMicroBatches& known, bool divided, const std::vector<double>& shares) {
    const std::vector<CostRow> rows = priced(links, stages, known, divided);
    ListScheduler::Costs costs;
    for (const CostRow& row : rows) costs.push_back(row.costs());
    if (costs.size() < known.count()) return kUnreachable;
    for (const double share : shares) {
        PipelineShape with_share = shape;
        with_share.memory_limit = static_cast<int64_t>(static_cast<double>(shape.memory_limit) * share);
        ListScheduler scheduler(with_share);
        int64_t least = kUnreachable;
        for (const int64_t extra : kFewExtras)
            for (const Rule rule : kFewRules) {
                const Policy policy = filling_policy(with_share, extra, rule, divided);
                least = std::min(least, scheduler.run(costs, policy, least, nullptr));
            }
        if (least < kUnreachable) return static_cast<int64_t>(static_cast<double>(least) * share);
    }
    return kUnreachable;
}

}  // namespace dynapipe
