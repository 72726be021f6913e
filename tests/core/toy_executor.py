"""An executor of tokens instead of tensors, written without a look at `verify`: what a plan does when it is run.

Ranks take turns at random. Channels are rendezvous FIFOs per pair of ranks: the n-th send of a channel meets its n-th
receive, and must carry what the receiver expects, in its shapes. A value names the pass that made it, so that a pass
fed with anything else fails.
"""

import random
from collections import defaultdict

from megatron_dynapipe.core import instructions as ins


class ToyError(Exception):
    """The lists cannot run, or do something else than they should."""


class Rank:
    def __init__(self, stage, steps):
        self.stage, self.steps, self.at = stage, list(steps), 0
        self.buffers = {}
        self.under_way = {}  # (sending?, payload, micro-batch, chunk) -> (pair, number)
        self.receiving = set()
        self.ran = []

    def take(self, *key):
        if key not in self.buffers:
            raise ToyError(f"stage {self.stage} has no {key}")
        return self.buffers[key]

    def put(self, key, value):
        if key in self.buffers:
            raise ToyError(f"stage {self.stage} has {key} already")
        self.buffers[key] = value


class ToyPipeline:
    def __init__(self, lists, *, micro_batches, chunks=1, forward_only=False, seed=0):
        self.ranks = [Rank(stage, steps) for stage, steps in enumerate(lists)]
        self.stages, self.chunks, self.forward_only = len(lists), chunks, forward_only
        self.micro_batches = micro_batches
        self.last = self.stages * chunks - 1
        self.sends, self.receives = defaultdict(list), defaultdict(list)
        self.random = random.Random(seed)

    def run(self):
        while any(rank.at < len(rank.steps) for rank in self.ranks):
            ready = [rank for rank in self.ranks if rank.at < len(rank.steps) and not self.blocked(rank)]
            if not ready:
                raise ToyError("the ranks wait for each other for ever")
            rank = self.random.choice(ready)
            self.step(rank, rank.steps[rank.at])
            rank.at += 1
        for rank in self.ranks:
            if rank.buffers or rank.under_way:
                raise ToyError(f"stage {rank.stage} leaves {rank.buffers} {rank.under_way}")
        expected = [
            (kind, row, chunk * self.stages + rank.stage)
            for rank in self.ranks
            for kind in ("F",) + (() if self.forward_only else ("B", "W"))
            for row in range(self.micro_batches)
            for chunk in range(self.chunks)
        ]
        if sorted(expected) != sorted(one for rank in self.ranks for one in rank.ran):
            raise ToyError("not every pass has run once")

    def blocked(self, rank):
        step = rank.steps[rank.at]
        if not isinstance(step, ins.SendWait | ins.RecvWait):
            return False
        sending = isinstance(step, ins.SendWait)
        key = (sending, step.payload, step.micro_batch, step.chunk)
        if key not in rank.under_way:
            raise ToyError(f"stage {rank.stage} waits for nothing: {step}")
        pair, number = rank.under_way[key]
        return len((self.receives if sending else self.sends)[pair]) <= number

    def step(self, rank, step):
        match step:
            case ins.Load(row):
                rank.put((ins.Buffer.DATA, row, 0), "data")
            case ins.Forward(row, chunk):
                self.forward(rank, row, chunk)
            case ins.Backward(row, chunk):
                self.backward(rank, row, chunk)
                self.weight(rank, row, chunk)
            case ins.BackwardInput(row, chunk):
                self.backward(rank, row, chunk)
            case ins.BackwardWeight(row, chunk):
                self.weight(rank, row, chunk)
            case ins.SendStart(payload, row, chunk, peer, shapes):
                value = rank.take(ins.SENT_BUFFER[payload], row, chunk)
                self.start(rank, self.sends, self.receives, step, (value, shapes), (rank.stage, peer))
            case ins.RecvStart(payload, row, chunk, peer, shapes):
                pair = ins.channel_of(payload, peer, rank.stage, self.stages), peer, rank.stage
                if pair in rank.receiving:
                    raise ToyError("two receives at once on one channel")
                rank.receiving.add(pair)
                self.start(rank, self.receives, self.sends, step, (self.wanted(rank, step), shapes), (peer, rank.stage))
            case ins.SendWait(payload, row, chunk):
                rank.under_way.pop((True, payload, row, chunk))
                rank.buffers[ins.SENT_BUFFER[payload], row, chunk] += " sent"
            case ins.RecvWait(payload, row, chunk):
                pair, number = rank.under_way.pop((False, payload, row, chunk))
                rank.receiving.discard(pair)
                rank.put((ins.RECEIVED_BUFFER[payload], row, chunk), self.sends[pair][number][0])
            case ins.Free(buffer, row, chunk):
                value = rank.take(buffer, row, chunk)
                if buffer in ins.SENT_BUFFER.values() and not value.endswith(" sent"):
                    raise ToyError("freed before it is sent")
                if not self.used(rank, buffer, row, chunk):
                    raise ToyError("freed before it is used")
                del rank.buffers[buffer, row, chunk]

    def start(self, rank, mine, theirs, step, what, way):
        pair = (ins.channel_of(step.payload, *way, self.stages), *way)
        number = len(mine[pair])
        if len(theirs[pair]) > number and theirs[pair][number] != what:
            raise ToyError(f"{theirs[pair][number]} meets {what}")
        key = (mine is self.sends, step.payload, step.micro_batch, step.chunk)
        if key in rank.under_way:
            raise ToyError("started twice")
        mine[pair].append(what)
        rank.under_way[key] = pair, number

    def wanted(self, rank, step):
        stage = step.chunk * self.stages + rank.stage
        activation = step.payload is ins.Payload.ACTIVATION
        return f"F{step.micro_batch}@{stage - 1}" if activation else f"B{step.micro_batch}@{stage + 1}"

    def forward(self, rank, row, chunk):
        stage = chunk * self.stages + rank.stage
        rank.take(ins.Buffer.DATA, row, 0)
        if stage > 0 and rank.take(ins.Buffer.INPUT, row, chunk) != f"F{row}@{stage - 1}":
            raise ToyError("wrong input")
        if stage < self.last:
            rank.put((ins.Buffer.OUTPUT, row, chunk), f"F{row}@{stage}")
        rank.ran.append(("F", row, stage))

    def backward(self, rank, row, chunk):
        stage = chunk * self.stages + rank.stage
        if ("F", row, stage) not in rank.ran:
            raise ToyError("backward before forward")
        if stage < self.last and rank.take(ins.Buffer.OUTPUT_GRAD, row, chunk) != f"B{row}@{stage + 1}":
            raise ToyError("wrong gradient")
        if stage > 0:
            rank.take(ins.Buffer.INPUT, row, chunk)
            rank.put((ins.Buffer.INPUT_GRAD, row, chunk), f"B{row}@{stage}")
        rank.ran.append(("B", row, stage))

    def weight(self, rank, row, chunk):
        stage = chunk * self.stages + rank.stage
        if ("B", row, stage) not in rank.ran:
            raise ToyError("weights before inputs")
        rank.ran.append(("W", row, stage))

    def used(self, rank, buffer, row, chunk):
        stage = chunk * self.stages + rank.stage
        if buffer is ins.Buffer.DATA:
            return all(("F", row, c * self.stages + rank.stage) in rank.ran for c in range(self.chunks))
        if buffer is ins.Buffer.INPUT:
            return ("F" if self.forward_only else "B", row, stage) in rank.ran
        return buffer is not ins.Buffer.OUTPUT_GRAD or ("B", row, stage) in rank.ran
