"""Independent score of `plan --json`: rebuilds every plan's time and memory from the cost model file alone.

    score_plans.py REPORT.json BATCHES.json COST.json --model gpt --layers 32 --hidden 4096 --dp 1 --tp 2 --pp 4
        [--memory-mb 36000] [--split equal] [--reference planner.json]

Rules: benchmarks/data/a100/README.md (costs, memory, distributed optimizer), 8 devices per node, 4800 Gbps inside a
node, 100 Gbps and 4 ms between nodes, transfers beside compute. Prints a line per batch (tokens/s, peak, share of the
time its stages work, how near the bound) and the geometric mean of the ratio to the published planner on the same
batches. Exits 1 on a broken plan: samples lost, a shape too small, passes that cannot progress, memory exceeded.
Imports nothing of the package. Files whose names end in .gz are unpacked.

A micro-batch with "layout": "packed" holds all its samples in one row without padding ("samples": [[i, j, …]], shape
[1, sum of input positions, sum of target positions], each sum rounded up to 8 and not larger; the samples' own lengths
are not rounded). From tables that were measured on padded micro-batches alone its cost is derived, in every table
(times, stored and peak activations, postprocess): sample i is charged 1/b of a padded micro-batch of b samples of its
own lengths, b = (positions of the row) / (positions of the sample), positions counting encoder and decoder together, b
at least 1 and not rounded; where size b was not measured or not feasible for these lengths, the largest size of the
grid below it that was. So a packed row runs as efficiently as a padded micro-batch of as many positions, and long
samples pay for their attention. A sample's share depends on the row's total; it is a constant once b is capped.

An entry [i, start, end] of a packed row of a decoder-only model is a piece of sample i. Pieces tile their sample, each
in another micro-batch of one replica; on every stage their forwards run up, their backwards down. A piece costs what a
sample of as many positions does, and 2 g · start · (end - start) in every table of the layers: T(l) = u + v l + g l² is
a table's column of one sample, g from its longest feasible length, half of it and the shortest. A layer also keeps
the gradients of keys and values of a piece that another follows, and under full recomputation the keys and values of
every piece.

Layers per stage may end in .5: that stage has the attention of its last layer (a T5 decoder's both), the next begins
with its MLP. Attention's share of a layer's time is its share of the micro-batch's floating-point operations: h hidden,
c heads x channels, f ffn, x input and y target positions, m of earlier pieces: attention x (8 h c + 4 c (x + m)), MLP
4 x h f; a decoder's y (12 h c + 4 c (y + x)) + 4 x h c and 4 y h f. Attention stores 13 of 34 parts, under full
recomputation each half what the layer does; either's peak is the layer's; parameters are as 4 h c (a decoder's 8 h c)
to 2 h f.

Divided backward passes: BI3 and BW3 in place of B3, BI first; the gradient leaves after BI. BW takes the layers'
forward time by their linears' share of FLOPs, BI the rest, the head included. Stored activations stay until BW.

Labels: a batch with `labels` says how many of each sample's last positions count. A plan with `"head": "labels"` runs
the head and the last layer's MLP over these: both take their share of the time (of a padded micro-batch: of size x
length). Activations are stored of all positions.

Virtual stages: `layers_per_stage` has a number for each, in the order of the model; virtual stage v lies on device v
modulo the devices, and its passes are F3.1 where it is the second of its device. Where a micro-batch's `recompute` is a
list, it has a mode for each virtual stage.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

from plan_costs import Cost, attention_shares, layer_costs, load, model_state, second_halves, stage_costs

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "published" / "planner.json"


def split_op(text, device, devices):
    """Kind, micro-batch and virtual stage of a pass that a device runs."""
    op = text.rstrip("0123456789.")
    row, _, chunk = text[len(op) :].partition(".")
    return op, int(row), device + int(chunk or 0) * devices


def transfer_ms(mb, a, i, j):
    def node(s):
        return s * a.dp * a.tp // 8

    return mb * 8 / 4800 if node(i) == node(j) else 4.0 + mb * 8 / 100


def replay(a, costs, stages, state):
    """Makespan (ms) and peak memory (MB) per stage of one replica, or None where it cannot progress."""
    pp, last = len(stages), len(costs[0]) - 1
    stages = [[split_op(op, s, pp) for op in ops] for s, ops in enumerate(stages)]
    pos, free, mem, peak = [0] * pp, [0.0] * pp, list(state), list(state)
    done = {}
    left = sum(map(len, stages))
    while left:
        moved = False
        for s in range(pp):
            while pos[s] < len(stages[s]):
                op, k, v = stages[s][pos[s]]
                if op == "F":
                    if v == 0:
                        ready = 0.0
                    elif ("F", k, v - 1) in done:
                        ready = done["F", k, v - 1] + transfer_ms(costs[k][v - 1][4], a, (v - 1) % pp, s)
                    else:
                        break
                    end = max(free[s], ready) + costs[k][v][0]
                    peak[s] = max(peak[s], mem[s] + costs[k][v][3])
                    mem[s] += costs[k][v][2]
                elif op == "BW":
                    if ("B", k, v) not in done:
                        break
                    end = free[s] + costs[k][v][6]
                    mem[s] -= costs[k][v][2]
                else:
                    if ("F", k, v) not in done:
                        break
                    if v == last:
                        ready = done["F", k, v]
                    elif ("B", k, v + 1) in done:
                        ready = done["B", k, v + 1] + transfer_ms(costs[k][v + 1][5], a, s, (v + 1) % pp)
                    else:
                        break
                    end = max(free[s], ready) + costs[k][v][1] - (costs[k][v][6] if op == "BI" else 0)
                    peak[s] = max(peak[s], mem[s])
                    mem[s] -= costs[k][v][2] if op == "B" else 0
                done["B" if op == "BI" else op, k, v] = free[s] = end
                pos[s] += 1
                left -= 1
                moved = True
        if not moved:
            return None
    return max(free), peak


def ceil8(n):
    return -(-n // 8) * 8


def positions_of(a, batch, i):
    """Input and target positions of a whole sample."""
    return max(batch["input"][i] - (a.model == "gpt"), 1), batch["target"][i] + 2 if a.model == "t5" else 0


def entries_of(a, batch, mb):
    """(sample, start, end) of all rows."""
    rows = [row if isinstance(row, list) else [row] for row in mb["samples"]]
    return [[tuple(x) if isinstance(x, list) else (x, 0, positions_of(a, batch, x)[0]) for x in row] for row in rows]


def labels_of(a, batch, entry):
    """Positions with labels of a sample's piece: a sample's last ones."""
    i, start, end = entry
    whole, _ = positions_of(a, batch, i)
    return max(0, end - max(start, whole - min(batch["labels"][i], whole)))


def misfit(a, batch, mb):
    """What is wrong with a micro-batch, or None; packed rows get what their costs are made from."""
    rows = entries_of(a, batch, mb)
    packed = mb.get("layout") == "packed"
    if mb.get("layout", "padded") not in ("padded", "packed") or (packed and len(rows) != 1):
        return f"layout {mb.get('layout')} with {len(rows)} rows"
    whole = [[positions_of(a, batch, i) for i, _, _ in row] for row in rows]
    is_piece = [end - start < most[0] for (_, start, end), most in zip(rows[0], whole[0], strict=True)]
    if any(is_piece) and (not packed or a.model != "gpt"):
        return "a piece of a sample outside a packed row of a gpt model"
    if a.labels:
        mb["labels"] = [labels_of(a, batch, entry) for row in rows for entry in row]
    if packed:
        mb["positions"] = [(end - start, most[1]) for (_, start, end), most in zip(rows[0], whole[0], strict=True)]
    if any(is_piece):
        mb["before"] = [start for _, start, _ in rows[0]]
        followed = [end < most[0] for (_, _, end), most in zip(rows[0], whole[0], strict=True)]
        mb["pieces"] = list(zip(is_piece, followed, strict=True))
    size, e, d = mb["shape"]
    need_e = max(ceil8(sum(end - start for _, start, end in row)) for row in rows)
    need_d = max(ceil8(sum(y for _, y in row)) for row in whole)
    if e < need_e or d < need_d or size != len(rows) or (packed and (e, d) != (need_e, need_d)):
        return f"shape {mb['shape']} does not hold its samples (needs {len(rows)},{need_e},{need_d})"
    return None


def out_of_order(held, stages):
    """Whether a stage runs the pieces of a sample in another order than forwards up, backwards down."""
    pieces = {}
    for k, entries in enumerate(held):
        for i, start, _ in entries:
            pieces.setdefault(i, []).append((start, k))
    chains = [[k for _, k in sorted(its)] for its in pieces.values() if len(its) > 1]
    if any(len(set(chain)) < len(chain) for chain in chains):
        return True
    for s, ops in enumerate(stages):
        passes = [split_op(op, s, len(stages)) for op in ops]
        at = {("B" if op == "BI" else op, k, v): n for n, (op, k, v) in enumerate(passes)}
        for chain, v in itertools.product(chains, {v for _, _, v in passes}):
            forwards, backwards = ([at[kind, k, v] for k in chain] for kind in "FB")
            if forwards != sorted(forwards) or backwards != sorted(backwards, reverse=True):
                return True
    return False


def loses_samples(a, batch, used):
    """Whether some position of a sample is in no micro-batch, or in two."""
    ends = {}
    for i, start, end in sorted(used):
        if ends.get(i, 0) != start:
            return True
        ends[i] = end
    return ends != {i: positions_of(a, batch, i)[0] for i in range(len(batch["input"]))}


def is_split(a, split):
    """Whether these are layers of virtual stages."""
    total_layers = (a.layers or 0) + (a.encoder_layers or 0) + (a.decoder_layers or 0)
    if not split or len(split) % a.pp or sum(split) != total_layers:
        return False
    return all(n > 0 and n % 0.5 == 0 for n in split) and not (a.split == "equal" and len(set(split)) != 1)


def modes_of(mb, split):
    """The recompute mode of each virtual stage."""
    modes = mb["recompute"]
    return [modes] * len(split) if isinstance(modes, str) else modes


def by_mode(cost, a, split, mb):
    """Costs of each virtual stage under its own recompute mode, what its second half takes at the end."""
    modes = modes_of(mb, split)
    under = {}
    for mode in set(modes):
        one = {**mb, "recompute": mode}
        costs = stage_costs(layer_costs(cost, a, one), split, one, a.hidden, attention_shares(cost, one))
        under[mode] = [(*c, half) for c, half in zip(costs, second_halves(cost, a, split, one), strict=True)]
    return [under[mode][v] for v, mode in enumerate(modes)]


def check_and_score(a, cost, batch, plan):
    used, worst, peak_all, work, bound = [], 0.0, 0.0, 0.0, 0.0
    if plan.get("error"):
        return {"error": plan["error"]}
    a.labels = plan.get("head") == "labels"
    if a.labels and "labels" not in batch:
        return {"error": "a head over labels alone, of a batch without labels"}
    if len(plan["replicas"]) != a.dp:
        return {"error": f"{len(plan['replicas'])} replicas, {a.dp} asked"}
    for r in plan["replicas"]:
        mbs, split = r["micro_batches"], r["layers_per_stage"]
        if not is_split(a, split):
            return {"error": f"layer split {split}"}
        for mb in mbs:
            if (wrong := misfit(a, batch, mb)) is not None:
                return {"error": wrong}
        held = [[entry for row in entries_of(a, batch, mb) for entry in row] for mb in mbs]
        used += [entry for entries in held for entry in entries]
        for s, ops in enumerate(r["stages"]):
            listed = [split_op(op, s, a.pp) for op in ops]
            divided = {(k, v) for op, k, v in listed if op == "BI"}
            if any(modes_of(mbs[k], split)[v] == "full" for k, v in divided):
                return {"error": f"stage {s} divides a backward pass under full recomputation"}
            on_device = itertools.product(range(len(mbs)), range(s, len(split), a.pp))
            passes = [(o, *at) for at in on_device for o in (("F", "BI", "BW") if at in divided else ("F", "B"))]
            if sorted(listed) != sorted(passes):
                return {"error": f"stage {s} runs the wrong passes"}
        if out_of_order(held, r["stages"]):
            return {"error": "pieces of a sample out of order"}
        costs = [by_mode(cost, a, split, mb) for mb in mbs]
        if any(math.isinf(v) for c in costs for st in c for v in st):
            return {"error": "a micro-batch outside the measured, feasible grid"}
        modes = {mode for mb in mbs for mode in modes_of(mb, split)}
        state = [max(x) for x in zip(*(model_state(cost, a, split, rc) for rc in modes), strict=True)]
        state = [sum(state[s :: a.pp]) for s in range(a.pp)]
        out = replay(a, costs, r["stages"], state)
        if out is None:
            return {"error": "passes cannot progress"}
        worst, peak_all = max(worst, out[0]), max(peak_all, max(out[1]))
        busy = [sum(v[0] + v[1] for c in costs for v in c[s :: a.pp]) for s in range(a.pp)]
        work += sum(busy) / a.pp
        bound = max(
            bound, max(busy[s] + min(sum(c[q][0] + c[q][1] for q in range(s)) for c in costs) for s in range(a.pp))
        )
    if loses_samples(a, batch, used):
        return {"error": "samples lost or repeated"}
    if peak_all > a.memory_mb * 1.0001:
        return {"error": f"peak {peak_all:.0f} MB over {a.memory_mb}"}
    tokens = sum(batch["input"]) + sum(batch.get("target") or [])
    return {
        "ms": worst,
        "tok_s": tokens / worst * 1e3,
        "peak": peak_all,
        "busy": work / a.dp / worst,
        "of_bound": bound / worst,
        "n": sum(len(r["micro_batches"]) for r in plan["replicas"]),
        "said": plan["predicted_ms"] / worst,
    }


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main():
    p = argparse.ArgumentParser()
    p.add_argument("report")
    p.add_argument("batches")
    p.add_argument("cost")
    p.add_argument("--model", required=True)
    p.add_argument("--layers", type=int)
    p.add_argument("--encoder-layers", type=int)
    p.add_argument("--decoder-layers", type=int)
    p.add_argument("--hidden", type=int, required=True)
    for n in ("dp", "tp", "pp"):
        p.add_argument("--" + n, type=int, required=True)
    p.add_argument("--memory-mb", type=float, default=36000)
    p.add_argument("--split", default="equal")
    p.add_argument("--reference", default=REFERENCE)
    a = p.parse_args()
    cost = Cost(a.cost)
    batches = {b["id"]: b for b in load(a.batches)["batches"]}
    layout = (a.model, a.dp, a.tp, a.pp)
    ref = {
        r["batch"]: r
        for r in load(a.reference)["results"]
        if (r["model"], r["data_parallel"], r["tensor_parallel"], r["pipeline_parallel"]) == layout
    }
    bad, ratios, faster = 0, [], []
    for plan in load(a.report)["iterations"]:
        out = check_and_score(a, cost, batches[plan["id"]], plan)
        line = {
            "id": plan["id"],
            **{k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()},
            "plan_s": round(plan["planning_seconds"]["total"], 4),
        }
        r = ref.get(plan["id"])
        if "error" in out:
            bad += not (r and "error" in r)
        elif r and "tokens_per_second" in r:
            ratios.append(out["tok_s"] / r["tokens_per_second"])
            faster.append(r["planning_seconds"] / plan["planning_seconds"]["total"])
            line["ratio"] = round(ratios[-1], 4)
        print(json.dumps(line))
    worst = min(ratios, default=math.nan)
    print(
        f"tokens/s over published: geomean {geomean(ratios):.4f} min {worst:.4f};"
        f" planning faster x{geomean(faster):.1f}; broken plans {bad}"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
