"""What `score_plans.py` charges: times and memory of layers, stages and model state from a cost model file alone.

The rules stand at the top of `score_plans.py`. Imports nothing of the package.
"""

import bisect
import gzip
import itertools
import json
import math
from pathlib import Path


def load(path):
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if str(path).endswith(".gz") else data)


class Grid:
    """Multilinear table over (micro-batch size, lengths); infinite where a needed corner was never measured."""

    def __init__(self, table):
        cells = {}
        for key, rows in table.items():
            lengths = tuple(int(x) for x in key.split(","))
            for size, value in rows:
                cells[(size, *lengths)] = value
        self.cells = cells
        self.axes = [sorted({c[i] for c in cells}) for i in range(len(next(iter(cells))))]

    def __call__(self, *x):
        lows, weights = [], []
        for axis, xi in zip(self.axes, x, strict=True):
            xi = max(xi, axis[0])
            if xi > axis[-1]:
                return math.inf
            i = min(max(bisect.bisect_right(axis, xi) - 1, 0), len(axis) - 2)
            lows.append(i)
            weights.append((xi - axis[i]) / (axis[i + 1] - axis[i]))
        total = 0.0
        for corner in range(1 << len(x)):
            factor, key = 1.0, []
            for d in range(len(x)):
                high = corner >> d & 1
                factor *= weights[d] if high else 1 - weights[d]
                key.append(self.axes[d][lows[d] + high])
            if factor:
                total += factor * self.cells.get(tuple(key), math.inf)
        return total


class Shared:
    """One sample's share of a padded micro-batch of b samples like it: value at b, divided by b."""

    def __init__(self, grid):
        self.grid = grid

    def __call__(self, b, *lengths):
        value = self.grid(b, *lengths)
        for size in reversed([n for n in self.grid.axes[0] if n < b]):
            if not math.isinf(value):
                break
            value, b = self.grid(size, *lengths), size
        return value / b


class Cost:
    def __init__(self, path):
        self.data, self.grids = load(path), {}
        self.key_channels = self.data["model"].get("heads", 0) * self.data["model"].get("kv_channels", 0)

    def packed(self, tp, recompute, table, part, lengths, total, before=(), labels=None):
        """Sum of the samples' shares; lengths: one tuple per sample (what the table is indexed by).

        before: positions that earlier pieces of each hold, for tables that hold attention.
        labels: positions of each that are run; None for all.
        """
        self(tp, recompute, table, part, 1, *lengths[0])
        share, memo = Shared(self.grids[tp, recompute, table, part]), {}
        for one, own in zip(lengths, total[1], strict=True):
            if (one, own) not in memo:
                memo[one, own] = share(max(total[0] / own, 1.0), *one)
        run = [n / one[0] for n, one in zip(labels, lengths, strict=True)] if labels else itertools.repeat(1)
        shares = sum(memo[one, own] * part for one, own, part in zip(lengths, total[1], run, strict=False))
        pairs = sum(2 * first * one[0] for one, first in zip(lengths, before, strict=False))
        return shares + (pairs * self.curvature(tp, recompute, table, part) if pairs else 0)

    def curvature(self, *key):
        """The g of a table's column of one sample."""
        lengths = [n for n in self.grids[key].axes[1] if not math.isinf(self(*key, 1, n))]
        longest, shortest = lengths[-1], lengths[0]
        rise = self(*key, 1, longest) - 2 * self(*key, 1, longest / 2) + self(*key, 1, shortest)
        return max(0.0, rise) * 2 / longest**2

    def __call__(self, tp, recompute, table, part, size, *lengths):
        key = (tp, recompute, table, part)
        if key not in self.grids:
            self.grids[key] = Grid(self.data["keys"][f"tp{tp}_{recompute}"][table][part])
        return self.grids[key](size, *lengths)


def layer_costs(cost, a, mb):
    """[(forward, backward, stored, peak, kind)] per layer in model order for one micro-batch; the last adds its head's
    forward and backward."""
    charged = packed_charge(cost, a, mb) if mb.get("layout") == "packed" else padded_charge(cost, a, mb)
    kinds = ["encoder"] * (a.layers or a.encoder_layers) + (["decoder"] * a.decoder_layers if a.model == "t5" else [])
    of = {
        k: (
            charged("time_ms", k + ".forward"),
            charged("time_ms", k + ".backward"),
            charged("stored_activation_mb", k),
            charged("peak_activation_mb", k),
            k[0],
        )
        for k in set(kinds)
    }
    if mb.get("pieces"):
        forward, backward, stored, peak, kind = of["encoder"]
        kept = kept_mb(cost, a, mb)
        of["encoder"] = (forward, backward, stored + kept, peak + kept, kind)
    layers = [of[k] for k in kinds]
    head = (charged("time_ms", "postprocess.forward"), charged("time_ms", "postprocess.backward"))
    return [*layers[:-1], (*layers[-1], *head)]


def kept_mb(cost, a, mb):
    """What a layer keeps of a row's pieces for others."""
    positions = 0
    for (own, _), (is_piece, is_followed) in zip(mb["positions"], mb["pieces"], strict=True):
        positions += own * (is_followed + (is_piece and mb["recompute"] == "full"))
    return 4 * positions * cost.key_channels / a.tp / 1e6


def packed_charge(cost, a, mb):
    _, e, d = mb["shape"]
    own = mb["positions"]  # (input, target) positions of every sample
    total = (e + d, [x + y for x, y in own])
    at = {
        "encoder": [(x,) for x, _ in own],
        "decoder": own,
        "postprocess": [((y if a.model == "t5" else x),) for x, y in own],
    }

    def charged(table, part):
        name = part.split(".")[0]
        before = mb.get("before", ()) if name == "encoder" else ()
        labels = mb.get("labels") if name == "postprocess" else None
        return cost.packed(a.tp, mb["recompute"], table, part, at[name], total, before, labels)

    return charged


def padded_charge(cost, a, mb):
    size, e, d = mb["shape"]
    at = {"encoder": (e,), "decoder": (e, d), "postprocess": (d if a.model == "t5" else e,)}

    def charged(table, part):
        name = part.split(".")[0]
        run = labelled(mb) if name == "postprocess" else 1
        return cost(a.tp, mb["recompute"], table, part, size, *at[name]) * run

    return charged


def labelled(mb):
    """The share of a micro-batch's positions that the last MLP, and the head, run."""
    size, e, _ = mb["shape"]
    positions = sum(x for x, _ in mb["positions"]) if mb.get("layout") == "packed" else size * e
    return sum(mb["labels"]) / positions if mb.get("labels") else 1


def attention_shares(cost, mb):
    """{kind: attention's share of a layer's operations}, over a micro-batch."""
    size, e, d = mb["shape"]
    model = cost.data["model"]
    h, c, f = model["hidden"], model["heads"] * model["kv_channels"], model["ffn"]
    own = mb["positions"] if mb.get("layout") == "packed" else [(e, d)] * size
    before = mb.get("before") or [0] * len(own)
    encoder = sum(x * (8 * h * c + 4 * c * (x + m)) for (x, _), m in zip(own, before, strict=True))
    decoder = sum(y * (12 * h * c + 4 * c * (y + x)) + 4 * x * h * c for x, y in own)
    mlps = [sum(4 * one[i] * h * f for one in own) for i in (0, 1)]
    return {"e": encoder / (encoder + mlps[0] or 1), "d": decoder / (decoder + mlps[1] or 1)}


def halves(layer, share, recompute):
    """A layer's attention and its MLP."""
    forward, backward, stored, peak, kind = layer
    kept = (stored, stored) if recompute == "full" else (stored * 13 / 34, stored * 21 / 34)
    parts = share[kind], 1 - share[kind]
    return [(forward * part, backward * part, kept[i], peak, kind) for i, part in enumerate(parts)]


def parts_of(layers, split, cut):
    """What every stage holds; cut(i) gives both halves of layer i."""
    out, start = [], 0
    for n in split:
        end = start + n
        first = [cut(int(start))[1]] if start % 1 else []
        last = [cut(int(end))[0]] if end % 1 else []
        out.append(first + layers[math.ceil(start) : int(end)] + last)
        start = end
    return out


def stage_costs(layers, split, mb, hidden, share=None):
    out = []
    size, e, d = mb["shape"]
    me, md = 2 * size * e * hidden / 1e6, 2 * size * d * hidden / 1e6
    head = layers[-1][5:] or (0.0, 0.0)
    layers = [layer[:5] for layer in layers]

    def cut(i):
        attention, (forward, backward, *kept) = halves(layers[i], share, mb["recompute"])
        run = labelled(mb) if i == len(layers) - 1 else 1
        return attention, (forward * run, backward * run, *kept)

    parts = parts_of(layers, split, cut)
    if mb.get("labels") and split[-1] >= 1:
        attention, mlp = cut(len(layers) - 1)
        parts[-1][-1] = (attention[0] + mlp[0], attention[1] + mlp[1], *layers[-1][2:])
    for part in parts:
        stored = peak = 0.0
        for layer in part:
            peak = max(peak, stored + layer[3])
            stored += layer[2]
        out.append(
            (
                sum(layer[0] for layer in part),
                sum(layer[1] for layer in part),
                stored,
                peak,
                me + (md if part[-1][4] == "d" else 0),
                me + (md if part[0][4] == "d" else 0),
            )
        )
    forward, backward, *rest = out[-1]
    return [*out[:-1], (forward + head[0], backward + head[1], *rest)]


def second_halves(cost, a, split, mb):
    """What second halves of divided backward passes take by stage: forward time by the linears' share of FLOPs."""
    size, e, d = mb["shape"]
    model = cost.data["model"]
    h, c, f = model["hidden"], model["heads"] * model["kv_channels"], model["ffn"]
    own = mb["positions"] if mb.get("layout") == "packed" else [(e, d)] * size
    before = mb.get("before") or [0] * len(own)
    charged = packed_charge(cost, a, mb) if mb.get("layout") == "packed" else padded_charge(cost, a, mb)
    kinds = ["encoder"] * (a.layers or a.encoder_layers) + (["decoder"] * a.decoder_layers if a.model == "t5" else [])
    attention = {
        "encoder": sum(8 * x * h * c for x, _ in own),
        "decoder": sum((12 * y + 4 * x) * h * c for x, y in own),
    }
    mlp = {"encoder": sum(4 * x * h * f for x, _ in own), "decoder": sum(4 * y * h * f for _, y in own)}
    inner = {
        "encoder": sum(4 * c * x * (x + p) for (x, _), p in zip(own, before, strict=True)),
        "decoder": sum(4 * c * y * (y + x) for x, y in own),
    }
    ends = {}  # of a layer's two halves
    for kind in set(kinds):
        time = charged("time_ms", kind + ".forward") / max(attention[kind] + mlp[kind] + inner[kind], 1)
        ends[kind] = (time * attention[kind], time * mlp[kind])
    halves = [half for kind in kinds for half in ends[kind]]
    halves[-1] *= labelled(mb)
    starts = [round(2 * sum(split[:s])) for s in range(len(split) + 1)]
    return [sum(halves[first:end]) for first, end in itertools.pairwise(starts)]


def model_state(cost, a, split, recompute):
    state = cost.data["keys"][f"tp{a.tp}_{recompute}"]["model_state_mb"]
    factor = 2 + 6 / a.dp
    n_enc = a.layers or a.encoder_layers
    layers = [state["encoder"]] * n_enc + [state.get("decoder", 0)] * (a.decoder_layers or 0)
    model = cost.data["model"]
    c, f = model["heads"] * model["kv_channels"], model["ffn"]
    extra = [0.0] * len(layers)
    for first in (0, n_enc) if a.decoder_layers else (0,):
        extra[first] = state["embedding"]

    def cut(i):
        attention = layers[i] * (4 * c / (4 * c + 2 * f) if i < n_enc else 8 * c / (8 * c + 2 * f))
        return attention + extra[i], layers[i] - attention

    whole = [layer + more for layer, more in zip(layers, extra, strict=True)]
    return [factor * sum(part) for part in parts_of(whole, split, cut)]
