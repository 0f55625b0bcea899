# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The model behind bench/scaling: one rank's training step with its gradient exchange, simulated event by event.

Times are in seconds, sizes in bytes, rates in bytes a second. All ranks are alike, so one stands for all: it computes,
its buckets become ready one after the other, and the exchange's thread takes them in that order, each through the
messages of its collective. docs/results/scaling.md says what is left out.
"""
import dataclasses
import functools
import math
import re

PIECE = 60 << 10  # dist/message_stream.hpp cuts messages into pieces of this size: one is worked on while the next comes
PARTITION = 4_096_000  # BytePS cuts tensors into parts of at most so many bytes


# ------------------------------------------------------------------ what travels

def resnet18_tensors(mode):
    """(rows, columns) of every matrix as it lies in memory, and the number of other values, of the ResNet-18 for CIFAR-10.

    `hybrid`: all but the first block, the shortcuts and the last layer factorized with a quarter of the outputs as rank.
    """
    matrices, others, inputs, block = [(27, 64)], 0, 64, 0
    for stage, planes in enumerate([64, 128, 256, 512]):
        for first in [True, False]:
            for channels in [inputs, planes]:
                if mode == "hybrid" and block > 0:
                    matrices += [(9 * channels, planes // 4), (planes // 4, planes)]
                else:
                    matrices.append((9 * channels, planes))
                others += 2 * planes
            if first and stage > 0:
                matrices.append((inputs, planes))
                others += 2 * planes
            inputs, block = planes, block + 1
    return [*matrices, (512, 10)], others + 10


def dense_bytes(tensors):
    matrices, others = tensors
    return 4 * (sum(rows * columns for rows, columns in matrices) + others)


def power_sgd_bytes(tensors, rank):
    """Of the two sums of a step: all P and what is not compressed, then all Q (compress/power_sgd.hpp)."""
    matrices, whole = tensors
    p = q = 0
    for rows, columns in matrices:
        r = min(rank, rows, columns)
        if r * (rows + columns) < rows * columns:
            p, q = p + r * columns, q + r * rows
        else:
            whole += rows * columns
    return 4 * (p + whole), 4 * q


def signum_bytes(gradient_bytes):
    """A bit a value, 32 to a word."""
    return 4 * math.ceil(gradient_bytes / 4 / 32)


# ------------------------------------------------------------------ links and collectives

@dataclasses.dataclass(frozen=True)
class Link:
    rate: float  # what one direction carries; both directions do at once
    latency: float = 0.0  # a message
    host: float = 0.0  # the host's time for a byte that it moves: copying, adding. Pieces overlap with the wire
    share: float = 0.0  # of the computing's core, which the exchange's thread takes while it waits for messages
    burst: float = 0.0  # bytes that a shaper lets through at once after a pause

    def lost(self, time, size):
        """What the computing loses while so many bytes are moved in that time."""
        return max(self.share * time, self.host * size)


class Wire:
    """A link's way out of one host. Behind a shaper it is a token bucket."""

    def __init__(self, link):
        self.link, self.tokens, self.at = link, link.burst, 0.0

    def send(self, start, size, sharers=1):
        """When `size` bytes that start at `start` have been sent and worked on; as many ranks do that as share the link. They
        work while more comes, on the last piece when all is there."""
        link = self.link
        tokens = min(link.burst, self.tokens + (start - self.at) * link.rate)
        slow, fast = (size - tokens) / link.rate, size / sharers * link.host
        # Tokens that were waited for are used up; a rounding error must not be left.
        self.tokens = 0.0 if slow >= fast else tokens + fast * link.rate - size
        self.at = start + max(slow, fast, 0.0)
        return start + max(fast, max(slow, 0.0) + min(size / sharers, PIECE) * link.host)

    def skip(self, time):
        """Goes on as if `time` had passed with the wire in the same state at its end."""
        self.at += time


@dataclasses.dataclass(frozen=True)
class Rounds:
    """`count` times: every rank sends and receives a message of `size` bytes, or those that share a link do together."""
    count: int
    size: float
    inner: bool = False  # within a host
    sharers: int = 1

    def once(self, wires, clock):
        wire = wires[self.inner]
        return wire.send(clock + wire.link.latency, self.size, self.sharers)

    def run(self, wires, clock):
        """The clock after all of them. Rounds from the first one that begins as the one before began take alike."""
        wire, before = wires[self.inner], None
        for done in range(self.count):
            state, start = wire.tokens, clock
            clock = self.once(wires, clock)
            if before == (state, wire.tokens) and state == wire.tokens:
                rest = (self.count - done - 1) * (clock - start)
                wire.skip(rest)
                return clock + rest
            before = (state, wire.tokens)
        return clock


def ring(size, ranks):
    """dist/all_reduce.hpp: reduce-scatter and all-gather of n / p bytes, 2 (p - 1) messages."""
    return [Rounds(2 * (ranks - 1), size / ranks)]


def recursive_doubling(size, ranks):
    """log2 p messages of all bytes; ranks beyond a power of two give theirs away first and get the sum at the end."""
    steps = ranks.bit_length() - 1
    return [Rounds(steps if ranks == 1 << steps else steps + 2, size)]


def narrow(size, ranks):
    """The exchange of 2-byte values, each rank with each; the sums back. `size` as sent."""
    return [Rounds(2 * (ranks - 1), size / ranks)]


def all_gather(size, ranks):
    return [Rounds(ranks - 1, size)]


def within(size, local, between):
    """Reduce-scatter within a host, something between the hosts, all-gather within. A host's ranks share its one link."""
    inside = Rounds(local - 1, size / local, inner=True)
    return [inside, *(dataclasses.replace(r, sharers=local) for r in between), inside]


def hierarchical_ring(size, hosts, local):
    return within(size, local, ring(size, hosts))


def hierarchical_doubling(size, hosts, local):
    return within(size, local, recursive_doubling(size, hosts))


def hierarchical_narrow(size, hosts, local):
    return within(size, local, narrow(size, hosts))


def hierarchical_all_gather(size, hosts, local):
    return [Rounds(hosts - 1, local * size, sharers=local), Rounds(local - 1, hosts * size, inner=True)]


def run(rounds, wires, clock):
    for r in rounds:
        clock = r.run(wires, clock)
    return clock


def bytes_sent(rounds):
    """By a rank, within a host and between hosts."""
    return sum(r.count * r.size / r.sharers for r in rounds)


@dataclasses.dataclass(frozen=True)
class Cluster:
    ranks: int
    link: Link
    topology: str = "ring"  # ring, ps, hierarchical
    local: int = 8  # hierarchical: ranks a host
    inner: Link = Link(12.5e9, 5e-6)  # hierarchical: within a host
    servers: int = 0  # ps; 0: as many as ranks
    algorithm: str = "best"  # of sums: ring, recursive doubling, or for each size what is faster
    early_update: bool = False  # of a bucket's parameters as soon as it has come, where buckets overlap

    def __post_init__(self):
        if self.topology == "hierarchical" and self.ranks > self.local and self.ranks % self.local:
            raise ValueError(f"{self.ranks} ranks are no whole number of hosts of {self.local}")

    @property
    def groups(self):
        """Hosts, and ranks on each."""
        local = min(self.local, self.ranks)
        return self.ranks // local, local

    def wires(self):
        return {False: Wire(self.link), True: Wire(self.inner)}

    @property
    def server_load(self):
        """How much longer than a worker's the servers' links are busy: 1 if there are enough of them."""
        return max(1.0, self.ranks / (self.servers or self.ranks))

    def rounds(self, kind, size):
        return _rounds(self, kind, size)


@functools.lru_cache(maxsize=65536)
def _rounds(cluster, kind, size):
    if cluster.ranks == 1:
        return ()
    flat = {"narrow": narrow, "gather": all_gather, "ring": ring, "recursive doubling": recursive_doubling}
    levels = {"narrow": hierarchical_narrow, "gather": hierarchical_all_gather, "ring": hierarchical_ring,
              "recursive doubling": hierarchical_doubling}

    def of(name):
        if cluster.topology == "hierarchical":
            return tuple(levels[name](size, *cluster.groups))
        return tuple(flat[name](size, cluster.ranks))
    if kind != "sum":
        return of(kind)
    if cluster.algorithm != "best":
        return of(cluster.algorithm)
    return min((of("ring"), of("recursive doubling")), key=lambda r: run(r, cluster.wires(), 0.0))


# ------------------------------------------------------------------ a step

@dataclasses.dataclass(frozen=True)
class Bucket:
    size: float
    ready: float  # after the step's start


@dataclasses.dataclass(frozen=True)
class Event:
    bucket: int
    ready: float
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Codec:
    """Times of a compressor, over the rounds of a step. `decode`: points (ranks, time), in the ranks' order: what gathers
    blocks decodes every rank's."""
    encode: float = 0.0
    decode: tuple = ((1, 0.0),)

    def decode_for(self, ranks):
        """On the lines through the points; beyond them, on the last line of either end."""
        if len(self.decode) == 1:
            return self.decode[0][1]
        pairs = list(zip(self.decode, self.decode[1:]))
        (r, t), (other, later) = next((pair for pair in pairs if ranks <= pair[1][0]), pairs[-1])
        return max(0.0, t + (later - t) * (ranks - r) / (other - r))

    def scaled(self, factor):
        return Codec(self.encode * factor, tuple((r, t * factor) for r, t in self.decode))


@dataclasses.dataclass(frozen=True)
class Network:
    """What was measured of a rank's step without exchange."""
    buckets: tuple
    compute: float  # forward and backward
    update: float

    @property
    def size(self):
        return sum(b.size for b in self.buckets)

    def scaled(self, factor):
        return Network(tuple(Bucket(b.size, b.ready * factor) for b in self.buckets), self.compute * factor,
                       self.update * factor)

    def merged(self, limit):
        """Neighbouring buckets together, as long as they are not larger than the limit."""
        merged = []
        for b in self.buckets:
            if merged and merged[-1].size + b.size <= limit:
                merged[-1] = Bucket(merged[-1].size + b.size, max(merged[-1].ready, b.ready))
            else:
                merged.append(b)
        return dataclasses.replace(self, buckets=tuple(merged))


@dataclasses.dataclass(frozen=True)
class Step:
    """`exposed`: what the step lasts beyond computing, encoding, decoding and the update."""
    compute: float
    encode: float
    exposed: float
    decode: float
    update: float
    sent: float
    timeline: tuple = ()

    @property
    def total(self):
        return self.compute + self.encode + self.exposed + self.decode + self.update


class Computing:
    """The rank's own work: how far it is when."""

    def __init__(self, work):
        self.work, self.done, self.clock, self.end = work, 0.0, 0.0, None

    def reach(self, amount):
        """Nothing is under way until the work has come so far, or that time is over already."""
        self.advance(self.clock + max(0.0, amount - self.done), 1.0)

    def busy(self, until, lost):
        """A bucket is under way and takes `lost` of the time, evenly."""
        self.advance(until, max(0.0, 1.0 - lost / (until - self.clock)) if until > self.clock else 1.0)

    def advance(self, until, speed):
        done = self.done + (until - self.clock) * speed
        if self.end is None and done >= self.work:
            self.end = self.clock + (self.work - self.done) / speed if speed > 0 else until
        self.done, self.clock = min(done, self.work), until

    def finish(self):
        """When the work is over."""
        self.reach(self.work)
        return self.clock if self.end is None else self.end


def finished(network, cluster, computed, timeline, sent):
    """The step, from when its work and its buckets are over. The update waits for all buckets, or for each its own."""
    end = computed
    if cluster.early_update:
        for bucket, event in zip(network.buckets, timeline):
            end = max(end, event.end) + network.update * bucket.size / network.size
    else:
        end = max([end, *(event.end for event in timeline)]) + network.update
    # Waiting for nothing is exactly that.
    exposed = max(0.0, end - network.compute - network.update)
    return Step(network.compute, 0.0, exposed if exposed > 1e-12 else 0.0, 0.0, network.update, sent, tuple(timeline))


def overlapped(network, cluster, kind="sum", factor=1.0):
    """A step whose buckets go one after the other while the backward pass still runs (dist/exchange.hpp)."""
    computing, wires, timeline, sent = Computing(network.compute), cluster.wires(), [], 0.0
    if cluster.ranks == 1:
        return Step(network.compute, 0.0, 0.0, 0.0, network.update, 0.0)
    for number, bucket in enumerate(network.buckets):
        computing.reach(bucket.ready)
        rounds, start = cluster.rounds(kind, bucket.size * factor), computing.clock
        end = run(rounds, wires, start)
        computing.busy(end, cluster.link.lost(end - start, bytes_sent(rounds)))
        timeline.append(Event(number, bucket.ready, start, computing.clock))
        sent += bytes_sent(rounds)
    return finished(network, cluster, computing.finish(), timeline, sent)


class Servers:
    """Parameter servers as BytePS has them: parts go up one after the other, each comes down when all workers' have
    been added; both directions are busy at once. Every part is spread over all servers."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.up, self.down = Wire(cluster.link), Wire(cluster.link)

    def transfer(self, start, size):
        """When `size` bytes are up, and when their sums are down."""
        link, load = self.cluster.link, self.cluster.server_load
        end = start
        while size > 0:
            part = min(size, PARTITION)
            size -= part
            summed = self.up.send(max(start, self.up.at), part * load) + link.latency
            end = self.down.send(max(summed, self.down.at), part * load) + link.latency
        return self.up.at, end


def overlapped_servers(network, cluster, factor=1.0):
    computing, servers, timeline = Computing(network.compute), Servers(cluster), []
    for number, bucket in enumerate(network.buckets):
        computing.reach(bucket.ready)
        start = computing.clock
        up, end = servers.transfer(start, bucket.size * factor)
        computing.busy(up, cluster.link.lost(up - start, bucket.size * factor))
        timeline.append(Event(number, bucket.ready, start, end))
    return finished(network, cluster, computing.finish(), timeline, network.size * factor)


def compressed(network, cluster, codec, sums=(), blocks=0):
    """A step with a compressor: it works after the backward pass, round after round, and nothing overlaps. Each of
    `sums` is a round; `blocks`: the bytes of this rank's block of a round that gathers."""
    clock, sent = network.compute, 0.0
    wires, servers = cluster.wires(), Servers(cluster)
    messages = [("sum", size) for size in sums] + ([("gather", blocks)] if blocks else [])
    start = clock
    for kind, size in messages if cluster.ranks > 1 else []:
        if cluster.topology == "ps":
            # Servers count the votes: what comes down is as large as what goes up.
            clock, sent = servers.transfer(clock, size)[1], sent + size
        else:
            rounds = cluster.rounds(kind, size)
            clock, sent = run(rounds, wires, clock), sent + bytes_sent(rounds)
    decode = codec.decode_for(1 if cluster.topology == "ps" and blocks else cluster.ranks)
    return Step(network.compute, codec.encode, clock - start, decode, network.update, sent)


# ------------------------------------------------------------------ systems

@dataclasses.dataclass(frozen=True)
class System:
    name: str
    mode: str
    compressor: str


SYSTEMS = [System("dense", "dense", "none"), System("dense, bf16", "dense", "bf16"),
           System("PowerSGD r4", "dense", "powersgd r4"), System("Signum", "dense", "signum"),
           System("Pufferfish", "hybrid", "none"), System("Pufferfish, bf16", "hybrid", "bf16"),
           System("Pufferfish + PowerSGD r4", "hybrid", "powersgd r4"), System("Pufferfish + Signum", "hybrid", "signum")]
BY_NAME = {s.name: s for s in SYSTEMS}
MIB = 1 << 20
PLANS = (0, 8 * MIB, 16 * MIB, 32 * MIB, 1 << 62)  # limits to which measured buckets are put together


def power_sgd_rank(compressor):
    """4 for "powersgd r4"; None for what is no PowerSGD."""
    match = re.fullmatch(r"powersgd r([1-9]\d{0,5})", compressor)
    return match and int(match[1])


def is_known(compressor):
    return compressor in ("none", "bf16", "fp16", "signum") or power_sgd_rank(compressor) is not None


def sums_of(network, mode, compressor):
    """Sizes of PowerSGD's two sums. Exact for the ResNet-18 of 10 classes; no other network's shapes are known."""
    tensors = resnet18_tensors(mode)
    if network.size != dense_bytes(tensors):
        raise ValueError(f"PowerSGD: a {mode} network of {network.size:,.0f} gradient bytes is not the ResNet-18, whose "
                         "shapes this model knows")
    return power_sgd_bytes(tensors, power_sgd_rank(compressor))


def payload_bytes(network, mode, compressor):
    """What a rank gives to the collectives of a step."""
    if compressor in ("bf16", "fp16"):
        return network.size // 2
    if compressor == "signum":
        return signum_bytes(network.size)
    if power_sgd_rank(compressor):
        return sum(sums_of(network, mode, compressor))
    return network.size


def simulate(network, mode, compressor, codec, cluster):
    """One step. `network` is that of the mode."""
    if compressor == "signum":
        return compressed(network, cluster, codec, blocks=signum_bytes(network.size))
    if power_sgd_rank(compressor):
        return compressed(network, cluster, codec, sums=sums_of(network, mode, compressor))
    is_narrow = compressor in ("bf16", "fp16")
    factor = 0.5 if is_narrow else 1.0
    if cluster.topology == "ps" and cluster.ranks > 1:
        return overlapped_servers(network, cluster, factor)
    return overlapped(network, cluster, "narrow" if is_narrow else "sum", factor)


def best_plan(network, mode, compressor, codec, cluster, limits=PLANS):
    """The fastest step over what buckets could be put together, and the number of buckets it has."""
    best = None
    for limit in limits:
        merged = network.merged(limit)
        step = simulate(merged, mode, compressor, codec, cluster)
        if best is None or step.total < best[0].total:
            best = step, len(merged.buckets)
    return best


# ------------------------------------------------------------------ links from measurements

def all_reduce_time(algorithm, size, ranks, link, pause=0.0):
    """Of one after another, with a pause before each: a shaper lets through at once what it has gathered meanwhile."""
    rounds = {"ring": ring, "recursive doubling": recursive_doubling}[algorithm](size, ranks)
    wires = {False: Wire(link)}
    wires[False].tokens = 0.0
    start = run(rounds, wires, 0.0) + pause
    return run(rounds, wires, start) - start


def solve(function, target, low, high):
    """x in low .. high with function(x) = target, for a function that rises; the nearest end if there is none."""
    if function(low) >= target:
        return low
    if function(high) <= target:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2
