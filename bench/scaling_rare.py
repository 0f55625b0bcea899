# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rare exchanges (distributed/rare_exchange.hpp) for bench/scaling: every rank takes H local steps of L seconds, then the ranks
exchange the change of their parameters, in F fragments which are due after step ceil(H (f + 1) / F) of a round, f = 0 .. F - 1.

A fragment takes X = (encoding + decoding) / F + the collectives of a fragment. Without delay steps a rank waits for it: a step
takes L + F X / H. With D > 0 a thread exchanges it while D more steps are taken, one fragment after the other, and a rank
waits only where the thread is late: if the thread keeps up and has a core of its own, a step takes
L + F max(0, X - D L) / H; if it cannot, F X / H. The outer optimizer's step, a pass over the parameters, is left out.
"""
import collections
import dataclasses

import scaling_model as model


@dataclasses.dataclass(frozen=True)
class Outer:
    """Options of the outer loop, as of the training examples."""
    local_steps: int  # H
    fragments: int = 1  # F
    delay: int = 0  # D, in local steps

    def __str__(self):
        return f"H = {self.local_steps}, F = {self.fragments}, D = {self.delay}"


class Clock:
    """A rank's clock and its thread's; exchanges under way, the oldest first."""

    def __init__(self, outer, local, duration, lost):
        self.outer, self.local, self.duration, self.lost = outer, local, duration, lost
        self.now = self.free = 0.0  # of the rank; when the thread is done
        self.steps = 0
        self.pending = collections.deque()  # (fragment, the step at which it takes effect, start, end)

    def complete(self):
        _, _, start, end = self.pending.popleft()
        overlapped = min(1.0, max(0.0, self.now - start) / self.duration) if self.duration > 0 else 0.0
        self.now = max(self.now + self.lost * overlapped, end)

    def compute_to(self, step):
        """Takes local steps up to this one; exchanges take effect on the way."""
        while self.pending and self.pending[0][1] <= step:
            due = max(self.steps, self.pending[0][1])
            self.now, self.steps = self.now + (due - self.steps) * self.local, due
            self.complete()
        self.now, self.steps = self.now + (step - self.steps) * self.local, step

    def exchange(self, fragment):
        if self.outer.delay == 0:
            self.now += self.duration
            return
        while any(one[0] == fragment for one in self.pending):
            self.complete()
        start = max(self.now, self.free)
        self.free = start + self.duration
        self.pending.append((fragment, self.steps + self.outer.delay, start, self.free))

    def round(self):
        first, steps, count = self.steps, self.outer.local_steps, self.outer.fragments
        for fragment in range(count):
            self.compute_to(first + -(-steps * (fragment + 1) // count))
            self.exchange(fragment)


def waiting(outer, local, duration, lost=0.0):
    """Mean seconds of a local step beyond `local`, in steady state."""
    clock, rounds = Clock(outer, local, duration, lost), 8
    for _ in range(4 + -(-outer.delay // outer.local_steps)):
        clock.round()
    start = clock.now
    for _ in range(rounds):
        clock.round()
    more = (clock.now - start) / (rounds * outer.local_steps) - local
    return more if more > 1e-12 else 0.0


def step(network, cluster, codec, collectives, outer):
    """The mean local step, with its share of the exchanges. With delay steps the thread encodes and decodes: the part that is not
    hidden counts as exposed."""
    if cluster.ranks == 1:
        return model.Step(network.compute, 0.0, 0.0, 0.0, network.update, 0.0)
    if cluster.topology == "ps":
        raise ValueError("rare exchanges are predicted without parameter servers")
    parts = [(kind, size / outer.fragments) for kind, size in collectives]
    travel, lost, sent = cluster.exchange(parts, cluster.wires(), 0.0)
    encode, decode = codec.encode, codec.decode_for(cluster.ranks)
    local, share = network.compute + network.update, outer.fragments / outer.local_steps
    if outer.delay == 0:
        exposed, of_step = waiting(outer, local, travel), 1 / outer.local_steps
        return model.Step(network.compute, encode * of_step, exposed, decode * of_step, network.update, sent * share)
    work = (encode + decode) / outer.fragments
    exposed = waiting(outer, local, travel + work, lost + (work if cluster.link.share > 0 else 0.0))
    return model.Step(network.compute, 0.0, exposed, 0.0, network.update, sent * share)
