# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers of bench/switch_study: those of rows and seeds, their differences, and how the page prints them.

`known` maps finished jobs to their documents. Differences are paired by seed: only seeds that both sides have count, and
of these only seeds whose two runs trained alike before the switch.
"""
import math
import statistics

import switch_jobs as jobs_of

SMALL = 0.5  # a difference below this, in the unit of its metric, needs several seeds
UNPAIRED, FEW = "‡", "§"
MARKS = (f"{UNPAIRED} marks differences of means over seeds: the two rows have the same seeds, but no two runs of them trained "
         "alike up to the switch, because their machines have other instruction sets, whose sums round differently. "
         f"{FEW} marks differences below {SMALL} of fewer than three pairs (two of sequence models), which are no verdict.")


class Differences(list):
    """Of two rows, a number for each pair of runs of one seed. `unpaired`: there is no pair, and the only number is that of
    the means over seeds. `needed`: pairs without which a small difference says nothing."""

    def __init__(self, values=(), needed=1):
        super().__init__(values)
        self.unpaired, self.needed = False, needed

    @property
    def mean(self):
        return statistics.mean(self)

    @property
    def few(self):
        return 0 < len(self) < self.needed and not self.unpaired and abs(self.mean) < SMALL

    @property
    def text(self):
        mark = f" {UNPAIRED}" if self.unpaired else f" {FEW}" if self.few else ""
        return spread(self) + mark


class Results:
    def __init__(self, known):
        self.rows, self.jobs = {}, {}
        for job, document in known.items():
            self.rows.setdefault(job.row.key, {})[job.seed] = document
            self.jobs[job.row.key] = job

    def of(self, key):
        """{seed: document}"""
        return self.rows.get(key, {})

    def values(self, key, of):
        """{seed: number}, of documents that have it."""
        found = {seed: of(document) for seed, document in sorted(self.of(key).items())}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, key, of):
        values = self.values(key, of)
        return statistics.mean(values.values()) if values else None

    def by_seed(self, one, other, of, how):
        """how(one's number, other's) for each seed of both on one kind of machine: for times, which do not depend on what is
        trained."""
        a, b = self.values(one, of), self.values(other, of)
        return [how(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())
                if all(agree(self.of(one)[seed], self.of(other)[seed], key) for key in ("machine", "instruction_set"))]

    def paired(self, one, other, of, how):
        """Differences how(one's number, other's) for each seed of both that trained alike; if no seed did, of the means."""
        a, b = self.values(one, of), self.values(other, of)
        both = sorted(a.keys() & b.keys())
        if not both:
            return Differences()
        needed = 3 if self.jobs[one].group.metric == jobs_of.ACCURACY else 2
        found = Differences((how(a[seed], b[seed]) for seed in both if self.trained_alike(one, other, seed)), needed)
        if not found:
            found.append(how(*(statistics.mean(values[seed] for seed in both) for values in (a, b))))
            found.unpaired = True
        return found

    def trained_alike(self, one, other, seed):
        """Whether the runs of two rows can have had the same steps before the switch."""
        a, b = self.of(one)[seed], self.of(other)[seed]
        same_options = self.jobs[one].dense_options == self.jobs[other].dense_options
        if same_options and None not in (losses := (first_loss(a), first_loss(b))):
            return math.isclose(*losses, rel_tol=1e-6)
        return agree(a, b, "instruction_set")

    def worse(self, reference, key):
        """By how much a row is worse than another of its group, in the unit of the group's metric."""
        metric = jobs_of.GROUPS[key.split("-", maxsplit=1)[0]].metric
        return self.paired(reference, key, at(metric.key), metric.loss)

    def better(self, key, reference):
        """By how much a row is better than another of its group, in the unit of the group's metric."""
        return self.worse(key, reference)


def at(*keys):
    """The number at this place of a document; None without."""
    def find(document):
        for key in keys:
            document = document.get(key) if isinstance(document, dict) else None
        return document
    return find


def agree(one, other, key):
    """Whether two documents have the same there, as far as both have it."""
    return None in (one.get(key), other.get(key)) or one[key] == other[key]


def first_loss(document):
    """Training loss of the first epoch, equal for two runs with the same steps; None of a low-rank epoch."""
    first = document["history"][0]
    return None if first.get("low_rank") else first.get("train_loss")


def step_of(part):
    """Milliseconds of a step of the dense or the low_rank network, of runs that did not share a device."""
    return lambda document: None if "device" in document else document.get(f"ms_per_step_{part}")


def drop(after):
    """By how many points accuracy falls at the switch; statistics of batch norms old (after) or re-estimated (estimated)."""
    def of(document):
        switch = document.get("switch", {})
        both = switch.get("accuracy_before"), switch.get(f"accuracy_{after}")
        return None if None in both else both[0] - both[1]
    return of


def slowdown(document):
    """Median time of a step of the second epoch over that of the first."""
    first, second = (epoch["ms_per_step"] for epoch in document["history"][:2])
    return second / first


def number(value, digits):
    """`value` with `digits` digits, and without the sign of a zero."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def spread(values, digits=2):
    """Mean, and in brackets least and most of several."""
    values = list(values)
    if not values:
        return ""
    text = number(statistics.mean(values), digits)
    return text if len(values) == 1 else f"{text} ({number(min(values), digits)} to {number(max(values), digits)})"


def whole(values):
    """A count that seeds may differ in."""
    values = list(values)
    if not values:
        return ""
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def minutes(documents):
    """Of the processor a run; of adopted runs without it, of training, marked; none of runs on a device."""
    documents = [d for d in documents if "device" not in d]
    spent = [d["cpu_seconds"] if "cpu_seconds" in d else d["training_seconds"] for d in documents]
    mark = "" if all("cpu_seconds" in d for d in documents) else " †"
    return spread((s / 60 for s in spent), 1) + mark if spent else ""
