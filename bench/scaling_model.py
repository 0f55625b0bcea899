# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The model of bench/scaling: one rank's training step with its gradient exchange, simulated event by event.

Times are in seconds, sizes in bytes, rates in bytes a second. All ranks are alike, so one stands for all: it computes,
its buckets become ready one after the other, and the exchange's thread takes them in that order, each through the
messages of its collective. With latency a, one-way delay d, rate R and p ranks, a message of m bytes takes

    t(m) = a + d + m / R + s(m),   s(m) = (ceil(m / W) - 1) max(0, d + (P - W) / R)

s: a stream has W bytes (256 pieces of P = 60 KiB) under way at most, and continues when a piece of the other side has arrived.
Collectives of n bytes, or of blocks of b bytes:

    sum by a ring             2 (p - 1) t(n / p)      halves of floats (bf16, fp16) the same, n as sent
    sum by doubling           log2 p t(n), two messages more if p is no power of two; the faster of both sums is taken
    gather                    (p - 1) t(b)            lengths of blocks before it: ceil(log2 p) messages
    two hops                  (p - 1) t(stripe's code) + (p - 1) t(owner's code)

A step without a compressor: max(computing, buckets one after the other from when they are ready) + update. With one:
computing + encoding + collectives + decoding + update, or bucket by bucket. docs/results/scaling.md says what is left out.
"""
import dataclasses
import functools
import math

PIECE = 60 << 10  # distributed/collectives/message_stream.hpp cuts messages into pieces of this size: one is worked on while the next comes
WINDOW = 256 * PIECE  # bytes under way at a time
PARTITION = 4_096_000  # bytes of the largest part into which BytePS cuts tensors


# ------------------------------------------------------------------ links and collectives

@dataclasses.dataclass(frozen=True)
class Link:
    rate: float  # what one direction carries; both directions do at once
    latency: float = 0.0  # a message
    host: float = 0.0  # the host's time for a byte that it moves: copying, adding. Pieces overlap with the wire
    share: float = 0.0  # of the computing's core, which the exchange's thread takes while it waits for messages
    burst: float = 0.0  # bytes that a shaper lets through at once after a pause
    delay: float = 0.0  # one way, of every message, beside the latency. The exchange's thread sleeps meanwhile
    window: float = 0.0  # bytes of a message that may be under way; 0: any number

    def idle(self, size, sharers=1):
        """Time of a message in which neither host works: its delay, and the waiting for room in the window."""
        own, rate = size / sharers, self.rate / sharers
        if not self.window or own <= self.window:
            return self.delay
        return self.delay + (math.ceil(own / self.window) - 1) * max(0.0, self.delay + (PIECE - self.window) / rate)

    def lost(self, time, size):
        """Seconds that the computing loses while `size` bytes are moved in `time` seconds."""
        return max(self.share * time, self.host * size)


class Wire:
    """A link's way out of one host. With a shaper it is a token bucket."""

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
        start = clock + wire.link.latency + wire.link.idle(self.size, self.sharers)
        return wire.send(start, self.size, self.sharers)

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
    """distributed/collectives/all_reduce.hpp: reduce-scatter and all-gather of n / p bytes, 2 (p - 1) messages."""
    return [Rounds(2 * (ranks - 1), size / ranks)]


def recursive_doubling(size, ranks):
    """log2 p messages of all bytes; ranks beyond a power of two give theirs away first and get the sum at the end."""
    steps = ranks.bit_length() - 1
    return [Rounds(steps if ranks == 1 << steps else steps + 2, size)]


def narrow(size, ranks):
    """The exchange of 2-byte values, each rank with each; the sums back. `size` as sent."""
    return [Rounds(2 * (ranks - 1), size / ranks)]


def all_gather(size, ranks):
    """gather_blocks and exchange_blocks of distributed/collectives/block_exchange.hpp: a message for each other rank, one after the other."""
    return [Rounds(ranks - 1, size)]


def all_lengths(size, ranks):
    """MPI's all-gather of a few bytes a rank."""
    count = (ranks - 1).bit_length()
    return [Rounds(count, size * (ranks - 1) / count)]


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


def hierarchical_blocks(size, hosts, local):
    """Every rank sends to each: the ranks of a host share its link."""
    return [Rounds((hosts - 1) * local, local * size, sharers=local), Rounds(local - 1, size, inner=True)]


def hierarchical_lengths(size, hosts, local):
    return all_lengths(size, hosts * local)


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

    def exchange(self, collectives, wires, clock):
        """The clock after collectives [(kind, bytes)], one after the other; the time that computing loses; the bytes sent."""
        lost = sent = 0.0
        for kind, size in collectives:
            rounds, start = self.rounds(kind, size), clock
            clock = run(rounds, wires, start)
            idle = sum(r.count * wires[r.inner].link.idle(r.size, r.sharers) for r in rounds)
            # Nothing is subtracted where nothing is idle, so that rounding stays out.
            lost += self.link.lost(clock - start - idle if idle else clock - start, bytes_sent(rounds))
            sent += bytes_sent(rounds)
        return clock, lost, sent


@functools.lru_cache(maxsize=65536)
def _rounds(cluster, kind, size):
    if cluster.ranks == 1:
        return ()
    flat = {"narrow": narrow, "gather": all_gather, "ring": ring, "recursive doubling": recursive_doubling,
            "blocks": all_gather, "lengths": all_lengths}
    levels = {"narrow": hierarchical_narrow, "gather": hierarchical_all_gather, "ring": hierarchical_ring,
              "recursive doubling": hierarchical_doubling, "blocks": hierarchical_blocks, "lengths": hierarchical_lengths}

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
    """A step whose buckets go one after the other while the backward pass still runs (distributed/exchange.hpp)."""
    computing, wires, timeline, sent = Computing(network.compute), cluster.wires(), [], 0.0
    if cluster.ranks == 1:
        return Step(network.compute, 0.0, 0.0, 0.0, network.update, 0.0)
    for number, bucket in enumerate(network.buckets):
        computing.reach(bucket.ready)
        start = computing.clock
        end, lost, of_bucket = cluster.exchange([(kind, bucket.size * factor)], wires, start)
        computing.busy(end, lost)
        timeline.append(Event(number, bucket.ready, start, computing.clock))
        sent += of_bucket
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
            summed = self.up.send(max(start, self.up.at), part * load) + link.latency + link.delay
            end = self.down.send(max(summed, self.down.at), part * load) + link.latency + link.delay
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


def compressed(network, cluster, codec, collectives):
    """A step with a compressor: it works after the backward pass, and nothing overlaps. `collectives`: [(kind, bytes)]."""
    clock, sent = network.compute, 0.0
    wires, servers = cluster.wires(), Servers(cluster)
    votes = cluster.topology == "ps" and any(kind == "gather" for kind, _ in collectives)
    if cluster.ranks > 1 and cluster.topology == "ps":
        # Servers count the votes: what comes down is as large as what goes up.
        for _, size in collectives:
            clock, sent = servers.transfer(clock, size)[1], sent + size
    elif cluster.ranks > 1:
        clock, _, sent = cluster.exchange(collectives, wires, clock)
    return Step(network.compute, codec.encode, clock - network.compute, codec.decode_for(1 if votes else cluster.ranks),
                network.update, sent)


def compressed_by_bucket(network, cluster, codec, collectives):
    """A step with a compressor of which every bucket has its share by size (exchange_options::compress_by_bucket): a thread
    encodes, sends and decodes each as soon as it is ready. If the thread has no core of its own (Link.share > 0), the
    computing loses the time of encoding and decoding. Both are parts of what is exposed."""
    if cluster.ranks == 1:
        return compressed(network, cluster, codec, ())
    computing, wires, timeline, sent = Computing(network.compute), cluster.wires(), [], 0.0
    for number, bucket in enumerate(network.buckets):
        share = bucket.size / network.size
        work = share * (codec.encode + codec.decode_for(cluster.ranks))
        computing.reach(bucket.ready)
        start = computing.clock
        end, lost, of_bucket = cluster.exchange([(kind, share * size) for kind, size in collectives], wires, start + work)
        computing.busy(end, lost + (work if cluster.link.share > 0 else 0.0))
        timeline.append(Event(number, bucket.ready, start, computing.clock))
        sent += of_bucket
    return finished(network, cluster, computing.finish(), timeline, sent)


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
