# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The systems that bench/scaling predicts: the rows of bench/compressors (compressor_rows.py), each on the dense network and
on the Pufferfish hybrid, with the collectives that compressor_bytes.py says they call."""
import dataclasses
import functools

import compressor_bytes as sizes
import scaling_model as model
import scaling_rare as rare
from compressor_rows import MODES, ROWS

BASES = {"dense": "dense", "hybrid": "Pufferfish"}
SHORT = ("none", "bf16", "powersgd-4", "signum")  # rows for plots and for the tables of many links
MIB = 1 << 20
ONE = 1 << 62  # one bucket for all
PLANS = (0, 8 * MIB, 16 * MIB, 32 * MIB, ONE)  # limits to which measured buckets are put together


@dataclasses.dataclass(frozen=True)
class System:
    name: str  # of a row
    mode: str

    @property
    def row(self):
        return ROWS[self.name]

    @property
    def title(self):
        base = BASES[self.mode]
        return base if self.name == "none" else f"{base} + {self.row.title}"


DENSE, PUFFERFISH = System("none", "dense"), System("none", "hybrid")


def systems(names=ROWS):
    return [System(name, mode) for mode in MODES for name in names if mode in ROWS[name].modes]


RECORDED = {row.compressor: row.name for row in ROWS.values() if row.is_step}  # as bench_exchange names rows in its records


def row_of(compressor):
    """The name of the row that a record's compressor is; None: none."""
    head, dash, rank = compressor.replace("powersgd r", "powersgd-r").partition("powersgd-r")
    return RECORDED.get(f"powersgd --compress-rank {rank}" if not head and dash else compressor)


@functools.lru_cache(maxsize=None)
def shapes(mode):
    return sizes.resnet18(mode)


@functools.lru_cache(maxsize=None)
def messages(name, mode):
    return ROWS[name].messages(shapes(mode))


@functools.lru_cache(maxsize=None)
def collectives(name, mode, ranks):
    """[(kind, bytes)] of a step, of rare exchanges of an exchange, in the library's order."""
    return tuple(part for m in messages(name, mode) for part in m.collectives(ranks))


def gathers(name):
    """Whether codes of several ranks are decoded, so that the time of decoding may depend on the number of ranks."""
    return any(not isinstance(m, sizes.Sum) for m in messages(name, ROWS[name].modes[0]))


@functools.lru_cache(maxsize=None)
def payload_bytes(name, mode, ranks):
    """Bytes that rank 0 of `ranks` gives to the collectives of a step, or of a rare exchange."""
    return sizes.payload(messages(name, mode), ranks)


def check(network, system, topology="ring"):
    """Throws ValueError, saying why, for a system that cannot be predicted for this network."""
    known = 4 * sizes.total(shapes(system.mode))
    if system.name not in SHORT[:2] and network.size != known:
        raise ValueError(f"{system.title}: a {system.mode} network of {network.size:,.0f} gradient bytes is not the ResNet-18, "
                         "whose shapes this model knows")
    if topology == "ps" and (system.row.rare or (gathers(system.name) and system.name != "signum")):
        raise ValueError(f"{system.title}: parameter servers add gradients and count votes")


def simulate(network, system, codec, cluster, outer=None, by_bucket=False):
    """One step. `network` is that of the system's mode. `outer`: rare exchanges by these options, not by the row's."""
    row = system.row
    if row.overlaps:
        is_narrow = row.family == "wire"
        known = 4 * sizes.total(shapes(system.mode))
        factor = 0.5 if is_narrow else payload_bytes(row.name, system.mode, 1) / known
        if cluster.topology == "ps" and cluster.ranks > 1:
            return model.overlapped_servers(network, cluster, factor)
        return model.overlapped(network, cluster, "narrow" if is_narrow else "sum", factor)
    parts = collectives(row.name, system.mode, cluster.ranks)
    if row.rare:
        return rare.step(network, cluster, codec, parts, outer or rare.Outer(row.local_steps))
    if by_bucket:
        return model.compressed_by_bucket(network, cluster, codec, parts)
    return model.compressed(network, cluster, codec, parts)


def best_plan(network, system, codec, cluster, limits=PLANS, outer=None, by_bucket=False):
    """The fastest step over what buckets could be put together, and the number of buckets it has."""
    if not system.row.overlaps and not (by_bucket and not system.row.rare):
        limits = (ONE,)  # it sees no buckets
    steps = ((simulate(merged, system, codec, cluster, outer, by_bucket), len(merged.buckets))
             for merged in map(network.merged, limits))
    return min(steps, key=lambda found: found[0].total)
