"""A transport over gloo that is as strict as NCCL: rendezvous sends, one order on both ends of every pair.

gloo takes small messages in at once and matches them by tag, which hides two mistakes: waiting for a send that its
receiver has not asked for, and issuing transfers in another order than the peer. Here every transfer carries a header
(its channel, its number, its shapes) that the receiver holds against its own, and a send is complete only with the
receiver's acknowledgement, which is sent when the receive is started.
"""

import datetime

import torch
import torch.distributed as dist

WAIT = datetime.timedelta(seconds=20)
HEADER = 12


class StrictTransport:
    def __init__(self, groups):
        self.groups = groups
        self.sent, self.received = dict.fromkeys(groups, 0), dict.fromkeys(groups, 0)
        self.unmatched = set()

    def start_send(self, channel, stage, tensors):
        group, number = self.groups[channel], self.sent[channel]
        self.sent[channel] += 1
        header = self.header(channel, number, tensors)
        acknowledged = torch.empty(1, dtype=torch.int64)
        works = [dist.isend(t.contiguous(), stage, group=group) for t in (header, *tensors)]
        works.append(dist.irecv(acknowledged, stage, group=group))

        def finish():
            for work in works:
                work.wait(WAIT)
            assert acknowledged.item() == number, (channel, acknowledged, number)

        return Finishing(finish)

    def start_recv(self, channel, stage, tensors):
        assert channel not in self.unmatched, f"two unmatched receives on {channel}"
        self.unmatched.add(channel)
        group, number = self.groups[channel], self.received[channel]
        self.received[channel] += 1
        header = torch.empty(HEADER, dtype=torch.int64)
        works = [dist.irecv(t, stage, group=group) for t in (header, *tensors)]
        works.append(dist.isend(torch.tensor([number]), stage, group=group))

        def finish():
            works[0].wait(WAIT)
            assert header.equal(self.header(channel, number, tensors)), (channel, number, header)
            for work in works[1:]:
                work.wait(WAIT)
            self.unmatched.remove(channel)

        return Finishing(finish)

    @staticmethod
    def header(channel, number, tensors):
        fields = [channel.payload, channel.downstream, channel.wraps, number, len(tensors)]
        fields += [size for tensor in tensors for size in tensor.shape]
        return torch.tensor(fields + [0] * (HEADER - len(fields)))


class Finishing:
    def __init__(self, finish):
        self.wait = finish
