# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What bench/scaling reads: the lines that bench/testbed, bench_exchange and bench_compressors write and the files of
bench/compressors, checked; the link that is fitted to them; and how far the model is from what was measured."""
import dataclasses
import json
import math
import re
import statistics

import scaling_model as model
import scaling_systems as systems
import study_runs
from compressor_rows import ROWS, Timing

LARGEST_FILE = 64 << 20
MODES = ("dense", "hybrid")
OWN = ("ring", "recursive doubling")  # all-reduces that the model knows


class BadInput(Exception):
    """One line that says what is wrong with a file."""


class Record(dict):
    """A JSON object of a file, which knows where it stands."""

    def __init__(self, where, content):
        super().__init__(content)
        self.where = where

    def fail(self, text):
        raise BadInput(f"{self.where}: {text}")

    def number(self, field, low=0.0, high=1e15):
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(f"a record of kind {self['kind']} needs a number for {field}")
        # Written so that NaN fails; whole numbers of thousands of digits are compared as they are.
        if not low <= value <= high:
            self.fail(f"{field} {shown(value)} is outside {low:g} .. {high:g}")
        return float(value)

    def whole(self, field, low, high):
        value = self.number(field, low, high)
        if value != math.floor(value):
            self.fail(f"{field} {value:g} is no whole number")
        return int(value)

    def text(self, field):
        value = self.get(field)
        if not isinstance(value, str):
            self.fail(f"a record of kind {self['kind']} needs a text for {field}")
        return value


def shown(value):
    return f"{value:g}" if isinstance(value, float) or abs(value) < 10**15 else "with too many digits"


def refuse_constant(name):
    raise ValueError(f"{name} is no number")


def objects_of(path):
    """(where, object) of a file with an object a line, or of one that is a JSON array."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise BadInput(f"{path}: larger than {LARGEST_FILE >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"{path}: no UTF-8 text") from None

    def parse(where, part):
        try:
            return json.loads(part, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as e:
            raise BadInput(f"{where}: no JSON: {str(e) or 'nested too deeply'}") from None
    if text.lstrip().startswith("["):
        return [(f"{path}, element {i + 1}", o) for i, o in enumerate(parse(path, text))]
    return [(f"{path}:{i + 1}", parse(f"{path}:{i + 1}", line)) for i, line in enumerate(text.split("\n")) if line.strip()]


def seconds(text):
    """0.1 for 100ms, as bench/testbed writes delays."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)", text)
    if not match:
        raise ValueError(f"{text!r} is no time (as 100ms)")
    return float(match[1]) / {"us": 1e6, "ms": 1e3, "s": 1}[match[2]]


@dataclasses.dataclass
class Group:
    """What was measured over one link."""
    link: Record = None
    all_reduces: list = dataclasses.field(default_factory=list)
    steps: list = dataclasses.field(default_factory=list)

    @property
    def title(self):
        if self.link is None:
            return "no link"
        hosts = f"{self.link.whole('hosts', 1, 1 << 20)} hosts, " if "hosts" in self.link else ""
        return f"{hosts}{self.nominal:g} Mbit/s" + (f", {1e3 * self.delay:g} ms each way" if self.delay else "")

    @property
    def nominal(self):
        """The rate that was asked for, in Mbit/s."""
        return self.link.number("rate_mbit", 1e-3, 1e7) if "rate_mbit" in self.link else self.goodput

    @property
    def goodput(self):
        """What TCP carries, in Mbit/s: both ways at once where that was measured, as collectives send."""
        one = self.link.number("raw_goodput_mbit", 1e-3, 1e7)
        return self.link.number("both_ways_mbit", 1e-3, 1e7) if "both_ways_mbit" in self.link else one

    @property
    def keeps_hosts_busy(self):
        """Then what TCP carries is the hosts' rate, not the link's."""
        return self.link is not None and self.goodput >= FAST

    @property
    def rate(self):
        """Of the link, in bytes a second."""
        return (self.nominal if self.keeps_hosts_busy else self.goodput) * 1e6 / 8

    @property
    def round_trip(self):
        """In seconds; 0 where it was not measured."""
        return self.link.number("round_trip_ms", 0.0, 1e6) / 1e3 if "round_trip_ms" in self.link else 0.0

    @property
    def delay(self):
        """Added to every message by its sender, in seconds; tc writes 100ms."""
        if self.link.get("delay") is None:
            return 0.0
        try:
            return seconds(str(self.link["delay"]))
        except ValueError:
            return self.link.fail(f"delay {self.link['delay']!r} is none (as 100ms)")

    @property
    def burst(self):
        """Of the shaper, in bytes; tc writes 256kb."""
        if "burst" not in self.link:
            return 0.0
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(b|kb|mb)?", str(self.link["burst"]))
        if not match:
            self.link.fail(f"burst {self.link['burst']!r} is none (as 256kb)")
        return float(match[1]) * {"b": 1, None: 1, "kb": 1 << 10, "mb": 1 << 20}[match[2]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Under which conditions a step was measured."""
    ranks: int
    batch: int


class Measured:
    """`codecs`: a folder with the files of bench/compressors; their times of encoding and decoding are preferred."""

    def __init__(self, paths, codecs=None):
        self.groups, self.networks, self.codecs, self.paths = [], {}, {}, [str(p) for p in paths]
        self.machines = []  # in words
        for path in paths:
            self.groups.append(Group())
            for where, content in objects_of(path):
                if not isinstance(content, dict):
                    raise BadInput(f"{where}: no JSON object")
                self.take(Record(where, content))
        self.groups = [g for g in self.groups if g.link or g.all_reduces or g.steps]
        for row in ROWS.values() if codecs is not None else []:
            if row.codec and (path := codecs / Timing(row.name).file).is_file():
                self.take_study(row, path)

    def take_study(self, row, path):
        try:
            listed = study_runs.read(path).get("codecs")
        except study_runs.StudyError as e:
            raise BadInput(str(e)) from None
        if not isinstance(listed, list) or not all(isinstance(c, dict) for c in listed):
            raise BadInput(f"{path}: no result of bench_compressors, it has no `codecs`")
        found = {}
        for c in listed:
            r = Record(str(path), {"kind": "codec", **c})
            found.setdefault((mode_of(r), row.name), []).append(codec_of(r))
        self.codecs.update(found)

    def take(self, r):
        kind = r.get("kind")
        if kind == "link":
            self.groups.append(Group(r))
            of = self.groups[-1]
            of.title, of.burst, of.round_trip, of.delay  # bad ones are refused here
        elif kind == "testbed" and isinstance(r.get("machine"), dict):
            machine = f"{r['machine'].get('cpu', '?')}, {r['machine'].get('cores', '?')} cores"
            self.machines += [machine] if machine not in self.machines else []
        elif kind == "allreduce":
            r["ranks"] = r.whole("ranks", 1, 1 << 20) if "ranks" in r else self.hosts(r)
            r.text("algorithm"), r.number("bytes", 1), r.number("ms", 1e-9), r.setdefault("skew_ms", 0), r.number("skew_ms")
            self.groups[-1].all_reduces.append(r)
        elif kind == "buckets":
            self.networks.setdefault((case_of(r), mode_of(r)), []).append(network_of(r))
        elif kind == "step":
            if r.text("system") == "ours":
                r["row"] = systems.row_of(r.text("compressor"))
                mode_of(r), case_of(r), r.number("payload_bytes", 1)
                for field in ["ms_per_step", "compute_ms", "encode_ms", "decode_ms", "update_ms"]:
                    r.number(field)
                r.number("exposed_ms", -1e15)
                self.groups[-1].steps.append(r)
        elif kind == "codec":
            key = mode_of(r), systems.row_of(r.text("compressor"))
            self.codecs.setdefault(key, []).append(codec_of(r))

    def hosts(self, r):
        """An all-reduce row without ranks has those of its link."""
        link = self.groups[-1].link
        if link is None or "hosts" not in link:
            r.fail("an all-reduce needs ranks, or a link with hosts before it")
        return link.whole("hosts", 1, 1 << 20)

    def cases(self):
        """Those with both networks, fewest ranks first: there a rank is least in another's way."""
        both = {case for case, mode in self.networks if mode == "dense"} & {c for c, mode in self.networks if mode == "hybrid"}
        return sorted(both, key=lambda c: (c.ranks, c.batch))

    def network(self, case, mode):
        return self.networks[case, mode][-1] if (case, mode) in self.networks else None

    def codec(self, case, mode, name):
        """Times of encoding and decoding of a row: medians over what was measured; None if nothing was. Where blocks are gathered
        decoding grows with the ranks: a median for each rank count."""
        if not ROWS[name].codec:
            return model.Codec()
        gathers = systems.gathers(name)
        rows = self.codecs.get((mode, name)) or [
            (r["ranks"], r["encode_ms"], r["decode_ms"]) for g in self.groups for r in g.steps
            if (r["mode"], r["row"], r["batch"]) == (mode, name, case.batch) and r["ranks"] == case.ranks]
        if not rows:
            return None
        decode = {}
        for ranks, _, ms in rows:
            decode.setdefault(ranks if gathers else 1, []).append(ms / 1e3)
        points = tuple((ranks, statistics.median(times)) for ranks, times in sorted(decode.items()))
        return model.Codec(statistics.median(e for _, e, _ in rows) / 1e3, points)


def codec_of(r):
    return r.whole("ranks", 1, 1 << 20), r.number("encode_ms"), r.number("decode_ms")


def mode_of(r):
    if r.text("mode") not in MODES:
        r.fail(f"mode {r['mode']!r} is neither dense nor hybrid")
    return r["mode"]


def case_of(r):
    return Case(r.whole("ranks", 1, 1 << 20), r.whole("batch", 1, 1 << 30))


def network_of(r):
    listed = r.get("buckets")
    if not isinstance(listed, list) or not 1 <= len(listed) <= 100000:
        r.fail("a record of kind buckets needs a list of buckets, 1 .. 100000 of them")
    compute = r.number("compute_ms", 1e-6)
    buckets = []
    for i, b in enumerate(listed):
        if not isinstance(b, dict):
            r.fail(f"bucket {i + 1} is no JSON object")
        b = Record(f"{r.where}, bucket {i + 1}", dict(b, kind="buckets"))
        size, ready = b.number("bytes", 1), b.number("ready_ms")
        # Medians of different times: the last bucket may be ready a little after the end.
        if ready > 1.05 * compute + 1:
            b.fail(f"ready after {ready:g} ms, but the backward pass ends after {compute:g} ms")
        buckets.append(model.Bucket(int(size), min(ready, compute) / 1e3))
    return model.Network(tuple(buckets), compute / 1e3, r.number("update_ms") / 1e3)


# ------------------------------------------------------------------ hosts and links

SMALL, LARGE = 65536, 1 << 20  # bytes of an all-reduce that says something of latencies, of bytes
FAST = 5000.0  # Mbit/s: a link that keeps hosts busy
TYPICAL_LATENCY = 5e-5


@dataclasses.dataclass
class Fit:
    link: model.Link
    rows: list  # all-reduces that it comes from: not to be validated


def share_of(groups):
    """Of a core that the exchange's thread takes while buckets are under way: its processor time as it was measured beside the
    steps (by its own clock, not the steps' time) over the time that the link needs for its bytes. None if it was not."""
    shares = []
    for group, r in ((g, r) for g in groups if g.link for r in g.steps):
        if r["row"] == "none" and r["ranks"] > 1 and "thread_processor_ms" in r:
            needed = 2 * (r["ranks"] - 1) / r["ranks"] * r["payload_bytes"] / group.rate
            shares.append(min(1.0, r.number("thread_processor_ms") / 1e3 / needed))
    return statistics.median(shares) if any(shares) else None


def largest_ring(group):
    rings = [r for r in group.all_reduces if r["algorithm"] == "ring" and r["ranks"] > 1 and r["bytes"] >= LARGE]
    return max(rings, key=lambda r: r["bytes"], default=None)


def fit_host(groups):
    """A host's time for a byte that it moves: with it the largest ring over the fastest link takes what it took. None where
    no link was fast enough to tell."""
    fast = [g for g in groups if g.keeps_hosts_busy and largest_ring(g)]
    if not fast:
        return None
    group = max(fast, key=lambda g: g.goodput)
    row, link = largest_ring(group), model.Link(group.rate, max(0.0, group.round_trip / 2 - group.delay), delay=group.delay)
    return model.solve(lambda x: all_reduce_time(row, dataclasses.replace(link, host=x)), row["ms"] / 1e3, 0.0, 1e-8)


def fit_link(group, host=0.0, share=0.0):
    """The rate is the measured goodput. The latency is that with which the smallest ring takes what it took; where several
    do, because the ring is too large for latency to count, the nearest to half of TCP's round trip."""
    burst = 0.0 if group.keeps_hosts_busy else group.burst
    latency = max(0.0, group.round_trip / 2 - group.delay) or TYPICAL_LATENCY
    link = model.Link(group.rate, latency, host, share, burst, group.delay, model.WINDOW)
    rings = [r for r in group.all_reduces if r["algorithm"] == "ring" and r["ranks"] > 1]
    small = min(rings, key=lambda r: r["bytes"], default=None)
    used = [largest_ring(group)] if group.keeps_hosts_busy and largest_ring(group) else []
    if not small or small["bytes"] > SMALL:
        return Fit(link, used)

    def error(latency):
        """In percent, rounded: less than that decides nothing."""
        predicted = 1e3 * all_reduce_time(small, dataclasses.replace(link, latency=latency))
        return round(100 * abs(math.log(predicted / small["ms"])))
    tried = [link.latency, *(10 ** (i / 500 - 6) for i in range(2501))]
    best = min(tried, key=lambda x: (error(x), abs(math.log(x / link.latency))))
    return Fit(dataclasses.replace(link, latency=best), [small, *used])


def all_reduce_time(row, link):
    """Of one that follows a barrier, log2 p messages; the slowest rank is late by half of the skew, in the mean."""
    barrier = math.ceil(math.log2(row["ranks"])) * (link.latency + link.delay)
    return model.all_reduce_time(row["algorithm"], row["bytes"], row["ranks"], link, barrier + row["skew_ms"] / 2e3)


# ------------------------------------------------------------------ validation

@dataclasses.dataclass
class Compared:
    where: str
    what: str
    predicted: float  # ms
    measured: float
    bound: float = None  # steps: the exposed time over a link without latency and hosts that cost nothing
    exposed: float = None
    beyond: bool = False  # the link keeps the hosts busy

    @property
    def error(self):
        """In percent of what was measured."""
        return 100 * (self.predicted / self.measured - 1)


def compare_group(measured, group, fit):
    """What the model says of a link's rows, beside what was measured; and what it can not say."""
    compared, left_out = [], []
    for r in group.all_reduces:
        what = f"{r['algorithm']}, {r['ranks']} ranks, {r['bytes']:,} B"
        if r["ranks"] == 1 or any(r is used for used in fit.rows):
            continue
        if r["algorithm"] not in OWN:
            left_out.append(f"all-reduces called {r['algorithm']}")
            continue
        time = all_reduce_time(r, fit.link)
        compared.append(Compared(group.title, what, time * 1e3, r["ms"], beyond=group.keeps_hosts_busy))
    for r in group.steps:
        if r["row"] is None:
            left_out.append(f"steps with {r['compressor']}")
            continue
        network = measured.network(case_of(r), r["mode"])
        if network is None:
            left_out.append(f"{r['mode']} steps of {r['ranks']} ranks, batch {r['batch']}: no buckets were measured")
            continue
        compared.append(compare_step(group, r, network, fit.link))
    return compared, sorted(set(left_out))


def compare_step(group, r, network, link):
    """Computing, encoding, decoding and the update are as measured; the buckets are ready as late as computing was."""
    network = dataclasses.replace(network.scaled(r["compute_ms"] / 1e3 / network.compute), update=r["update_ms"] / 1e3)
    codec = model.Codec(r["encode_ms"] / 1e3, ((r["ranks"], r["decode_ms"] / 1e3),))
    ideal = dataclasses.replace(link, latency=0.0, host=0.0, share=0.0, delay=0.0)
    system = systems.System(r["row"], r["mode"])
    try:
        systems.check(network, system)
    except ValueError as e:
        r.fail(str(e))
    of = [systems.simulate(network, system, codec, model.Cluster(r["ranks"], l, early_update=True)) for l in [link, ideal]]
    known = systems.payload_bytes(system.name, system.mode, r["ranks"])
    # ATOMO's are drawn anew in each step, with these expected bytes.
    if abs(known - r["payload_bytes"]) > (0.5 * known if system.row.family == "atomo" else 0):
        r.fail(f"payload of {r['payload_bytes']:,} bytes, but {known:,} by the model ({r['mode']}, {r['compressor']})")
    what = f"step, {r['mode']}, {system.row.title}, {r['ranks']} ranks"
    return Compared(group.title, what, of[0].total * 1e3, r["ms_per_step"], of[1].exposed * 1e3, r["exposed_ms"],
                    group.keeps_hosts_busy)
