#include "search/packed_starts.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "checks.h"
#include "search/budget.h"
#include "search/options.h"
#include "search/row_sizes.h"

namespace dynapipe {
namespace {

constexpr int64_t kLevels[] = {0, 205, 358, 512, 640, 768, 1024};  // of memory, in 1024ths
constexpr int64_t kPlenty = 512;  // of memory, in 1024ths, that samples under their fastest modes leave to passes
constexpr int64_t kWidths[] = {1, 2, 3};    // rows of the mode that keeps the least, in rows of the others
constexpr size_t kRowsCompared = 16;        // where a sample may go
constexpr int64_t kUniform = 2;             // starts of every mode alone
constexpr int64_t kHalfWay[] = {181, 128};  // from a power of two to the next: about the root of 2
constexpr size_t kRowSizes = 3;             // powers of two that are built, and the sizes half-way above them
constexpr size_t kManySamples = 10'000;     // of more, powers of two alone are built: fewer starts are improved, too

// Time that each sample of a class saves by going to its next option, and what memory that takes.
struct Upgrade {
    int32_t of;  // class
    size_t to;
    int64_t saved, pressure;
};

class Starts : RowSizes {
public:
    Starts(const Problem& problem, CostCache& costs, BatchMaker& maker)
        : RowSizes(problem, costs, maker), maker_(maker) {}

    PackedStarts all() {
        const std::vector<int64_t> sizes = this->sizes();
        size_t built = 0;  // sizes of which rows fit
        for (size_t i = 0; i < sizes.size() && built < kRowSizes; ++i) {
            const int64_t before = fitting_;
            start_with(sizes[i]);
            if (positions_.size() <= kManySamples) start_with(sizes[i] * kHalfWay[0] / kHalfWay[1]);
            built += fitting_ > before;
        }
        for (size_t mode = 0; mode < problem_.modes.size() && !problem_.pipeline.forward_only; ++mode)
            uniform(mode, sizes[0]);
        return std::move(found_);
    }

private:
    void start_with(int64_t size);
    void uniform(size_t mode, int64_t size);
    int64_t evened(int64_t rows) const;
    bool cost(int64_t size);
    bool build(int64_t size, size_t fastest);
    std::vector<Option> options(int32_t of_class, size_t fastest) const;
    void pressure_of(int32_t of_class, size_t mode, int64_t rows, int64_t times);
    void rows(int64_t size, int64_t width, std::vector<MicroBatches>& found);
    bool fill(size_t mode, const std::vector<int32_t>& samples, int64_t rows, MicroBatches& out);
    void sort_chains(MicroBatches& rows) const;
    const std::vector<Share>& share(size_t mode, int32_t of_class) const {
        return shares_[mode * classes_.size() + of_class];
    }

    BatchMaker& maker_;
    std::vector<std::vector<Share>> shares_;  // [modes × classes][types of stages]; none where not covered
    std::vector<size_t> mode_of_;             // [samples]
    std::vector<int64_t> pressure_;           // [stages] memory that rows in flight take, in 2^-20 of what there is
    int64_t fitting_ = 0;                     // starts whose rows fit alone, found before or not
    PackedStarts found_;
};

// Starts with rows of a size, which every sample has to have costs in.
void Starts::start_with(int64_t size) {
    if (!cost(size)) return;
    for (size_t fastest = 0; fastest < problem_.modes.size(); ++fastest)
        if (build(size, fastest)) break;
}

// What samples cost in rows of a size; whether every one can run in such.
bool Starts::cost(int64_t size) {
    const size_t modes = problem_.modes.size();
    shares_.assign(modes * classes_.size(), {});
    for (size_t i = 0; i < classes_.size(); ++i) {
        bool covered = false;
        for (size_t mode = 0; mode < modes; ++mode)
            covered |= costs_.shares(mode, classes_[i].sample, size, shares_[mode * classes_.size() + i]);
        if (!covered) return false;
    }
    return true;
}

// The modes of a class, from `fastest` on, on the lower hull of time over memory.
std::vector<Option> Starts::options(int32_t of_class, size_t fastest) const {
    std::vector<Option> all;
    for (size_t mode = fastest; mode < problem_.modes.size(); ++mode) {
        const std::vector<Share>& its = share(mode, of_class);
        if (its.empty() || !maker_.freedom().allows(mode)) continue;
        Option option{mode, 0, 0};
        std::vector<int64_t> stored(problem_.stages(), 0);
        for (size_t v = 0; v < problem_.modules.size(); ++v) {
            option.time += time(its[costs_.type_of()[v]]);
            stored[v % problem_.stages()] += its[costs_.type_of()[v]].stored;
        }
        for (size_t s = 0; s < problem_.stages() && !problem_.pipeline.forward_only; ++s)
            option.pressure = std::max(option.pressure, stored[s] / kScale * in_flight_[s] * kScale / room(s));
        all.push_back(option);
    }
    return lower_hull(std::move(all));
}

// Counts so many samples of a class in, or out, of what stages hold of rows in flight, at so many rows to a replica.
void Starts::pressure_of(int32_t of_class, size_t mode, int64_t rows, int64_t times) {
    if (problem_.pipeline.forward_only) return;
    const std::vector<Share>& its = share(mode, of_class);
    for (size_t v = 0; v < problem_.modules.size(); ++v) {
        const size_t s = v % problem_.stages();
        const int64_t kept = its[costs_.type_of()[v]].stored / kScale * std::min(in_flight_[s], rows);
        pressure_[s] += times * (kept / (rows * problem_.replicas) * (kScale * kScale) / room(s));
    }
}

// All starts with rows of a size and modes from `fastest` on; whether others are not worth it, since memory holds all
// samples under their fastest modes, or some run under no other.
bool Starts::build(int64_t size, size_t fastest) {
    std::vector<int32_t> every(positions_.size());
    std::iota(every.begin(), every.end(), 0);
    const int64_t count = std::max<int64_t>(1, rows_of(every, size) / problem_.replicas);
    mode_of_.assign(positions_.size(), 0);
    pressure_.assign(problem_.stages(), 0);
    std::vector<Upgrade> upgrades;
    for (size_t of_class = 0; of_class < classes_.size(); ++of_class) {
        const std::vector<Option> hull = options(of_class, fastest);
        if (hull.empty()) return true;
        for (int32_t sample : classes_[of_class].members) mode_of_[sample] = hull[0].mode;
        pressure_of(of_class, hull[0].mode, count, classes_[of_class].members.size());
        for (size_t k = 1; k < hull.size(); ++k)
            upgrades.push_back({static_cast<int32_t>(of_class), hull[k].mode, hull[k - 1].time - hull[k].time,
                                std::max<int64_t>(1, hull[k].pressure - hull[k - 1].pressure)});
    }
    std::stable_sort(upgrades.begin(), upgrades.end(), [](const Upgrade& a, const Upgrade& b) {
        return static_cast<__int128>(a.saved) * b.pressure > static_cast<__int128>(b.saved) * a.pressure;
    });
    size_t done = 0, members = 0;  // upgrades, and samples of the next one
    for (int64_t level : kLevels) {
        const std::pair before{done, members};
        while (done < upgrades.size() && *std::max_element(pressure_.begin(), pressure_.end()) < level * kScale) {
            const Upgrade& next = upgrades[done];
            const std::vector<int32_t>& samples = classes_[next.of].members;
            const int32_t sample = samples[members];
            pressure_of(next.of, mode_of_[sample], count, -1);
            mode_of_[sample] = next.to;
            pressure_of(next.of, next.to, count, 1);
            if (++members < samples.size()) continue;
            members = 0;
            ++done;
        }
        if (std::pair{done, members} == before && (level != kLevels[0] || fastest > 0)) continue;
        for (int64_t width : kWidths) {
            if (width > 1 && (fastest > 0 ||
                              std::find(mode_of_.begin(), mode_of_.end(), problem_.modes.size() - 1) == mode_of_.end()))
                break;
            rows(size, width, fastest > 0 ? found_.without_fastest : found_.rows);
        }
    }
    return done == upgrades.size() && *std::max_element(pressure_.begin(), pressure_.end()) < kPlenty * kScale;
}

// Starts with every sample under one mode, in rows as large as the memory holds: as many as fill the pipeline or, where
// such rows do not fit alone, more.
void Starts::uniform(size_t mode, int64_t size) {
    const int64_t fewest = fewest_under(mode, size);
    if (fewest == 0) return;
    mode_of_.assign(positions_.size(), mode);
    const int64_t until = fitting_ + kUniform, most = static_cast<int64_t>(positions_.size()) / problem_.replicas;
    int64_t each = fewest;
    for (int64_t tried = 0; fitting_ < until && (tried < kUniform || each <= most); ++tried) {
        const int64_t its_size = total_ / (each * problem_.replicas);
        if (its_size > 0 && cost(its_size)) rows(its_size, 1, found_.rows);
        each += std::max<int64_t>(each / kFewRows, 1);
    }
}

// As many rows for every replica where a row more or less is felt.
int64_t Starts::evened(int64_t rows) const {
    const int64_t each = std::max<int64_t>((rows + problem_.replicas / 2) / problem_.replicas, 1);
    return each > kFewRows ? rows : each * problem_.replicas;
}

// A start with the present modes.
void Starts::rows(int64_t size, int64_t width, std::vector<MicroBatches>& found) {
    const size_t modes = problem_.modes.size();
    std::vector<std::vector<int32_t>> samples(modes);
    for (size_t i = 0; i < mode_of_.size(); ++i) samples[mode_of_[i]].push_back(i);
    std::vector<int64_t> rows(modes, 0);
    for (size_t mode = 0; mode < modes; ++mode) {
        if (samples[mode].empty()) continue;
        const int64_t its_size = mode + 1 == modes ? size * width : size;
        const int64_t pieces =
            std::count_if(samples[mode].begin(), samples[mode].end(), [&](int32_t i) { return is_piece(i); });
        rows[mode] = std::max(rows_of(samples[mode], its_size), pieces);  // a piece to a row at most
    }
    const int64_t made = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const auto shared = [&](size_t mode) { return static_cast<int64_t>(samples[mode].size()) - rows[mode]; };
    for (int64_t lacking = evened(made) - made; lacking > 0; --lacking) {
        size_t most = 0;  // the mode with the most samples beside others in a row
        for (size_t mode = 1; mode < modes; ++mode)
            if (shared(mode) > shared(most)) most = mode;
        if (shared(most) == 0) break;
        ++rows[most];
    }
    for (int64_t surplus = made - evened(made); surplus > 0 && !problem_.is_cut(); --surplus)
        --*std::max_element(rows.begin(), rows.end());
    MicroBatches start;
    for (size_t mode = 0; mode < modes; ++mode)
        if (rows[mode] > 0 && !fill(mode, samples[mode], rows[mode], start)) return;
    ++fitting_;
    sort_chains(start);
    const bool known = std::any_of(found.begin(), found.end(), [&](const MicroBatches& other) {
        return std::equal(
            start.begin(), start.end(), other.begin(), other.end(),
            [](const MicroBatch* a, const MicroBatch* b) { return a->modes == b->modes && a->samples == b->samples; });
    });
    if (!known && static_cast<int64_t>(start.size()) >= problem_.replicas) found.push_back(std::move(start));
}

// Puts the rows that hold pieces behind the others, in the order of the pieces.
void Starts::sort_chains(MicroBatches& rows) const {
    std::stable_sort(rows.begin(), rows.end(), [](const MicroBatch* a, const MicroBatch* b) {
        return (a->pieces.empty() ? -1 : a->pieces[0]) < (b->pieces.empty() ? -1 : b->pieces[0]);
    });
}

// Spreads samples over rows of one mode; false where one of them cannot run.
bool Starts::fill(size_t mode, const std::vector<int32_t>& samples, int64_t rows, MicroBatches& out) {
    const size_t kinds = costs_.types();
    std::vector<int64_t> total(kinds, 1), load(kinds * samples.size()), heaviest(samples.size(), 0);
    for (int32_t sample : samples)
        for (size_t kind = 0; kind < kinds; ++kind) total[kind] += time(share(mode, class_of_[sample])[kind]);
    std::vector<size_t> order(samples.size());
    std::iota(order.begin(), order.end(), size_t{0});
    // So many parts of all that a short sample among very many has some, too: those without any would fill one row.
    const __int128 parts = kScale * std::max(kScale, static_cast<int64_t>(samples.size()));
    for (size_t i = 0; i < samples.size(); ++i)
        for (size_t kind = 0; kind < kinds; ++kind) {
            const auto part =
                static_cast<int64_t>(time(share(mode, class_of_[samples[i]])[kind]) * parts / total[kind]);
            load[i * kinds + kind] = part;
            heaviest[i] = std::max(heaviest[i], part);
        }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        const bool piece = is_piece(samples[a]), other = is_piece(samples[b]);
        return piece != other ? piece : heaviest[a] > heaviest[b];
    });

    std::vector<std::vector<int32_t>> row_samples(rows);
    std::vector<int64_t> held(rows * kinds, 0);
    std::set<std::pair<int64_t, int64_t>> by_load;  // (load of the busiest kind of stage, row)
    for (int64_t row = 0; row < rows; ++row) by_load.emplace(0, row);
    int64_t empty = 0;  // rows from here on hold nothing: pieces come first, each into one of them
    for (size_t i : order) {
        std::pair<int64_t, int64_t> least{0, 0};
        auto chosen = by_load.end();
        size_t compared = 0;
        const bool piece = is_piece(samples[i]);
        const size_t most = piece ? 1 : kRowsCompared;
        auto row = piece ? by_load.find({0, empty++}) : by_load.begin();
        for (; row != by_load.end() && compared < most; ++row, ++compared) {
            std::pair<int64_t, int64_t> after{0, 0};  // busiest kind, sum
            for (size_t kind = 0; kind < kinds; ++kind) {
                const int64_t with = held[row->second * kinds + kind] + load[i * kinds + kind];
                after.first = std::max(after.first, with);
                after.second += with;
            }
            if (chosen == by_load.end() || after < least) {
                least = after;
                chosen = row;
            }
        }
        const int64_t taken = chosen->second;
        auto entry = by_load.extract(chosen);
        for (size_t kind = 0; kind < kinds; ++kind) held[taken * kinds + kind] += load[i * kinds + kind];
        row_samples[taken].push_back(samples[i]);
        entry.value() = {least.first, taken};
        by_load.insert(std::move(entry));
    }
    for (std::vector<int32_t>& row : row_samples) {
        if (row.empty()) continue;
        const MicroBatch* made = maker_.make(std::move(row), mode, true);
        if (!made) return false;
        out.push_back(made);
    }
    return true;
}

}  // namespace

PackedStarts packed_starts(const Problem& problem, CostCache& costs, BatchMaker& maker) {
    return Starts(problem, costs, maker).all();
}

int64_t estimated_ns(const Problem& problem, CostCache& costs, BatchMaker& maker) {
    const auto estimates = RowSizes(problem, costs, maker).estimates();
    return estimates.empty() ? kUnreachable : estimates[0].first;
}

}  // namespace dynapipe
