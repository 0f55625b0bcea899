# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The page of bench/compressors, from the JSON files of its runs: docs/results/compressors.md."""
import dataclasses
import json

import compressor_bytes as sizes
import curve_runs
import study_runs
from compressor_rows import BEST, MODES, RANKS, ROWS, SEEDS, Timing, Training, chosen_rate
from curve_runs import TARGETS, mean, not_all, phases, seconds_of, time_to
from study_runs import StudyError
from switch_page import spread

RATES = (0.1, 1, 10)  # Gbit/s
LINK = 0.1  # Gbit/s, of the times to an accuracy
JUDGED = 8  # ranks, of the verdicts
# Most copies of the gradients that encoding and decoding of two ranks' codes shall take, by family.
MOST_COPIES = {**dict.fromkeys(("signum", "efsign", "doublesqueeze", "onebit", "qsgd", "terngrad", "binary"), 3), "topk": 8}
NAMES = {"dense": "dense network", "hybrid": "Pufferfish hybrid"}

# When to take a system: what it is for. What was measured follows on the page.
ABOUT = {
    "none": "**none**: gradients travel whole, in fp32, while the backward pass runs. Take it when the link carries them within "
            "the backward pass, and as the base of every comparison.",
    "wire": "**bf16 and fp16**: halves of the bytes, with nothing to keep between steps. Take bf16 first "
            "whenever communication is exposed: there is no setting to choose.",
    "powersgd": "**PowerSGD**: sums of two thin factors of each matrix, with error feedback. Its bytes are a sum, so they do not "
                "grow with the ranks. Take it on slow links, also with many ranks; a higher rank costs bytes and gives accuracy.",
    "signum": "**Signum**: signs of each rank's momentum and their majority. Take it only if a learning rate of its own can be "
              "sought. By gather its bytes grow with the ranks; by two hops they do not, and the result has the same bits, so "
              "the two rows share their accuracy.",
    "topk": "**top-k**: the largest entries of each tensor, with error feedback. Its blocks are gathered, so its bytes grow with "
            "the ranks: take it for few ranks on slow links.",
    "randomk": "**random-k and random block**: the same random entries on all ranks, with error feedback. Their bytes are a sum "
               "without indices and encoding is a copy. At a share of 1 % they lost 42 to 47 points here: do not take them in "
               "a short training.",
    "dgc": "**DGC**: top-k with momentum and its correction inside of the compressor; vectors travel whole. Take it where so few "
           "entries are sent that top-k with the optimizer's momentum trains badly. The optimizer has no momentum here.",
    "efsign": "**EF-sign**: a bit a value and a norm a tensor, with error feedback. Take it for 2 ranks; from 3 on "
              "DoubleSqueeze sends less, and loses more accuracy.",
    "doublesqueeze": "**DoubleSqueeze**: EF-sign by two hops, with a second memory at the owner of each stripe. Take it for a bit "
                     "a value with 3 ranks and more.",
    "onebit": "**1-bit SGD**: a bit a value and two means for each output unit, with error feedback. Take it where signs with one "
              "norm a tensor are too coarse.",
    "qsgd": "**QSGD**: random rounding to 2, 4 or 8 bits, unbiased, without memory. Take 8 bits where no state may be kept "
            "between steps and the ranks are few.",
    "terngrad": "**TernGrad**: minus, zero or plus with one scaler a tensor, unbiased towards limited gradients, without memory. "
                "Take it only if error feedback is no choice.",
    "binary": "**stochastic binary**: the least or the largest value of each tensor, unbiased, without memory. A base line: take "
              "it to compare with.",
    "atomo": "**ATOMO**: few singular triplets, or entries, drawn with the probabilities of least variance; unbiased, without "
             "memory. Take it where unbiased gradients are required; PowerSGD sends the same kind of factors with error feedback.",
    "powerfish": "**Powerfish**: PowerSGD before the switch, plain gradients of the factors after it. Take it with Pufferfish when "
                 "the dense epochs are what waits for the link.",
    "rare": "**rare exchanges**: ranks take local steps and exchange the change of their parameters, the more rarely the higher "
            "the learning rate. Take them for links between sites, where nothing that travels in each step is fast enough.",
    "pactrain": "**PacTrain**: a share of the weights is removed once, and the gradients of the others are summed while the "
                "backward pass runs, without indices. Computing stays that of the whole network. Take it where the pruned "
                "network is wanted anyway.",
}

# Only numbers that were read in the authors' public code, logs, README (log) or in an abstract (abstract).
PUBLISHED = [
    ("powersgd", "ResNet-18, CIFAR-10, 4 nodes: rank 1 94.25 %, rank 2 94.49 %, Accordion between the two 94.72 %",
     "Accordion's public logs, one seed"),
    ("topk", "ResNet-18, CIFAR-10: 10 % of the entries 93.08 %, 99 % of the entries 94.09 %, without memory",
     "Accordion's public logs"),
    ("dgc", "0.1 %: ResNet-50, ImageNet, 8, 16 and 32 nodes: 76.6, 76.5, 76.3 % (dense 76.2); VGG-16-BN 74.1, 73.8, 73.3 % "
     "(dense 73.4)", "README of DGC's public code"),
    ("doublesqueeze", "as accurate as error feedback on one side", "abstract"),
    ("qsgd", "ResNet-152 on 16 GPUs 1.8 times as fast to full accuracy", "abstract"),
    ("pactrain", "1.25 to 8.72 times the throughput of training with compression, under limited bandwidth", "abstract"),
]

INTRODUCTION = """<!-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception -->
<!-- Written by bench/compressors; the numbers are those of compressors/*.json. -->
# What may travel in place of the gradients

This page compares every compressor, PacTrain and rare exchanges by their bytes, their computing, the time of a step on three
links, and accuracy, so that you can choose one. Each has two rows: on the dense network, and on the *Pufferfish hybrid*, whose
layers are factorized after the first epoch. The hybrid of the published width leaves the first block dense, that of width 16 the
first two stages, as in [exchange_curves.md](exchange_curves.md).

- **Payload** is what a rank hands to collectives in a step, **sent** what rank 0 of p ranks sends: of a *sum* of n bytes
  2 (p - 1) / p n, of a *gather* (p - 1) times its block, by *two hops* the codes of the other ranks' stripes and then the code of
  its own stripe p - 1 times. Both are exact, of the ResNet-18 of the published width (11,173,834 parameters, the hybrid
  3,336,138); of ATOMO they are expected values.
- **Encoding and decoding** are those of the same network in one thread (`bench_compressors`); *in copies*: divided by the time
  of a copy of all gradients in the same run.
- **Accuracy** is that of a ResNet-18 of width 16 on CIFAR-10, 4 epochs, two ranks of 64 images, on the test set after the last
  epoch, never the best over epochs. Rows with a learning rate in bold had three of them tried; the best by seed 1's test
  accuracy counts, which favours these rows a little.
"""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Of a rank, in ms."""
    forward: float
    compute: float
    update: float


def step_times(path):
    """{mode: StepTimes} of a file of bench/testbed."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as e:
        raise StudyError(f"{path}: not readable as lines of JSON ({e})") from None
    times = {r["mode"]: StepTimes(r["forward_ms"], r["compute_ms"], r["update_ms"]) for r in lines
             if r.get("kind") == "buckets" and r.get("network") == "resnet18"}
    if lacking := [mode for mode in MODES if mode not in times]:
        raise StudyError(f"{path}: no times of a {' or '.join(lacking)} ResNet-18's step (kind buckets)")
    return times


class Results:
    def __init__(self, known, steps):
        self.known, self.steps = known, steps

    def codec(self, row, mode, ranks):
        """(ms of encoding, ms of decoding); zeros where there is nothing to encode, None if it has not been timed."""
        if not row.codec:
            return 0.0, 0.0
        document = self.known.get(Timing(row.name))
        found = [c for c in document["codecs"] if (c["mode"], c["ranks"]) == (mode, ranks)] if document else []
        return (found[0]["encode_ms"], found[0]["decode_ms"]) if found else None

    def copies(self, row, mode, ranks):
        """Time of encoding and decoding in copies of the gradients, measured in the same run; None if it has not been timed."""
        document = self.known.get(Timing(row.name)) if row.codec else None
        found = [c for c in document["codecs"] if (c["mode"], c["ranks"]) == (mode, ranks)] if document else []
        return (found[0]["encode_ms"] + found[0]["decode_ms"]) / found[0]["copy_ms"] if found and found[0].get("copy_ms") else None

    def trained(self, row, mode):
        """{seed: document} with the chosen rate."""
        rate = chosen_rate(row.name, mode, self.known)
        if rate is None:
            return {}
        found = {seed: self.known.get(Training(row.same_as or row.name, mode, rate, seed)) for seed in SEEDS}
        return {seed: d for seed, d in found.items() if d is not None and not d.get("diverged")}

    def tried(self, row, mode):
        """How many rates have run, and how many of them diverged."""
        jobs = [Training(row.same_as or row.name, mode, rate, SEEDS[0]) for rate in row.rates]
        found = [self.known[job] for job in jobs if job in self.known]
        return len(found), sum(bool(d.get("diverged")) for d in found)

    def accuracies(self, row, mode):
        return {seed: d["accuracy"] for seed, d in self.trained(row, mode).items()}

    def loss(self, row, mode):
        """Points below the uncompressed network, seed by seed."""
        base, ours = self.accuracies(ROWS["none"], mode), self.accuracies(row, mode)
        return [base[seed] - ours[seed] for seed in ours if seed in base]

    def local_steps(self, row, mode):
        """Mean number of steps between two exchanges; None if no such run is there."""
        for document in self.trained(row, mode).values():
            if rare := document["exchange"].get("rare"):
                return rare["local_steps"] / max(1, rare["outer_steps"])
        return None

    def sent(self, row, mode, ranks):
        """Bytes a step; None for rare exchanges whose number is not known."""
        of_exchange = sizes.sent(row.messages(sizes.resnet18(mode)), ranks)
        if not row.rare:
            return of_exchange
        steps = self.local_steps(row, mode)
        return None if steps is None else of_exchange / steps

    def step_ms(self, row, mode, ranks, rate):
        """Predicted; None without the codec's times."""
        codec, sent, t = self.codec(row, mode, ranks), self.sent(row, mode, ranks), self.steps[mode]
        if codec is None or sent is None:
            return None
        travel = 8e-6 * sent / rate
        if row.overlaps:
            return max(t.compute, t.forward + travel) + t.update
        shared_by = self.local_steps(row, mode) if row.rare else 1
        return t.compute + sum(codec) / shared_by + travel + t.update


def in_mode(mode):
    return [row for row in ROWS.values() if mode in row.modes]


def listed(texts):
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def number(value, digits=0):
    return "-" if value is None else f"{value:,.{digits}f}"


# --- tables ---

def bytes_table(mode, results):
    lines = [f"| system | collective | payload, p = {RANKS[0]} | " + " | ".join(f"sent, p = {p}" for p in RANKS) + " | encode, ms | "
             + " | ".join(f"decode, ms, p = {p}" for p in RANKS) + f" | both, p = {RANKS[0]}, in copies |",
             "|---|---|---:|" + "---:|" * (2 * len(RANKS) + 2)]
    shapes = sizes.resnet18(mode)
    for row in in_mode(mode):
        messages = row.messages(shapes)
        payload = sizes.payload(messages, RANKS[0])
        if row.rare:
            steps = results.local_steps(row, mode)
            payload = None if steps is None else payload / steps
        codecs = [results.codec(row, mode, p) for p in RANKS] if row.codec else [(None, None)] * len(RANKS)
        times = [None if c is None else c[0] for c in codecs[:1]] + [None if c is None else c[1] for c in codecs]
        cells = ["not timed" if row.codec and ms is None else number(ms, 1) for ms in times]
        lines.append(f"| {row.title} | {sizes.collectives(messages)} | {number(payload)} | "
                     + " | ".join(number(results.sent(row, mode, p)) for p in RANKS) + f" | {' | '.join(cells)} | "
                     f"{number(results.copies(row, mode, RANKS[0]), 1)} |")
    return [*lines, ""]


def copies_goal(mode, results):
    """Which rows take more copies than MOST_COPIES, in a sentence."""
    timed = {row: copies for row in in_mode(mode) if row.family in MOST_COPIES
             and (copies := results.copies(row, mode, RANKS[0])) is not None}
    if not timed:
        return []
    over = [f"{row.title} ({copies:.1f})" for row, copies in timed.items() if copies > MOST_COPIES[row.family]]
    return [f"Goals: {MOST_COPIES['topk']} copies for top-k, {MOST_COPIES['qsgd']} for signs, three levels and few bits. "
            + (f"Missed by {listed(over)}." if over else "All are met."), ""]


def step_table(mode, results):
    columns = [(p, rate) for p in RANKS for rate in RATES]
    values = {row.name: [results.step_ms(row, mode, p, rate) for p, rate in columns] for row in in_mode(mode)}
    least = [min((v[i] for v in values.values() if v[i] is not None), default=None) for i in range(len(columns))]
    lines = ["| system | " + " | ".join(f"p = {p}, {rate:g} Gbit/s" for p, rate in columns) + " |", "|---|" + "---:|" * len(columns)]
    for row in in_mode(mode):
        cells = [f"**{v:,.0f}**" if v is not None and v == best else number(v) for v, best in zip(values[row.name], least)]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return [*lines, ""]


def link_ms(row, document):
    """What the bytes that a step of the narrow network sends between two hosts take at LINK, by the epoch. Of the payload of the
    row that was trained, the share that is sent by this row; a narrower network has the same share but for rounding."""
    shapes = sizes.resnet18("dense")
    share = sizes.sent(row.messages(shapes), 2) / sizes.payload(ROWS[row.same_as or row.name].messages(shapes), 2)
    return lambda epoch: 8e-6 * share * curve_runs.payload(document, epoch) / LINK


def seconds_to(row, results, mode, target):
    """Predicted, in the mean of the seeds that reach it."""
    found = []
    for document in results.trained(row, mode).values():
        found.append(time_to(document, target, seconds_of(document, link_ms(row, document))))
    if not found:
        return ""
    return "not reached" if None in found else f"{sum(found) / len(found):.0f}"


def accuracy_table(mode, results):
    lines = ["| system | learning rate | payload a step, bytes | ms a step | accuracy, %: seeds | mean (least to most) | points "
             "below none | " + " | ".join(f"seconds to {t} %" for t in TARGETS) + " |",
             "|---|---|---:|---:|---|---:|---:|" + "---:|" * len(TARGETS)]
    for row in in_mode(mode):
        trained, (tried, diverged) = results.trained(row, mode), results.tried(row, mode)
        if not trained:
            text = f"**diverged** at {diverged} of {len(row.rates)} rates" if diverged else "not run"
            lines.append(f"| {row.title} | {text} | | | | | |" + " |" * len(TARGETS))
            continue
        document, rate = next(iter(trained.values())), chosen_rate(row.name, mode, results.known)
        rates = f"{rate:g}" if len(row.rates) == 1 else f"**{rate:g}** of {', '.join(f'{r:g}' for r in sorted(row.rates))}"
        if len(row.rates) > tried:
            rates += f" ({tried} tried)"
        if diverged:
            rates += f" ({diverged} diverged)"
        parts = phases(document)
        steps = dict.fromkeys(f"{mean(p, 'ms_per_step') + curve_runs.exposed_ms(document):.0f}" for p in parts)
        accuracies = results.accuracies(row, mode)
        lines.append(f"| {row.title} | {rates} | {curve_runs.payloads(document)} | {', '.join(steps)} | "
                     f"{', '.join(f'{s}: {a:.2f}' for s, a in accuracies.items())} | {spread(accuracies.values())} | "
                     f"{'' if row.name == 'none' else spread(results.loss(row, mode))} | "
                     + " | ".join(seconds_to(row, results, mode, t) for t in TARGETS) + " |")
    return [*lines, ""]


# --- what the tables say ---

def winners(results):
    """At each rate, the systems of both networks that no other one beats in both time and accuracy."""
    lines = ["## Who wins where", "",
             f"Systems of both networks that no other system beats in both the predicted time of a step with {JUDGED} ranks and the "
             f"accuracy of seed {SEEDS[0]}, the fastest first: milliseconds a step, accuracy.", "", "| Gbit/s | systems |", "|---:|---|"]
    for rate in RATES:
        found = [(ms, accuracy, f"{row.title}, {mode}") for mode in MODES for row in in_mode(mode)
                 if (ms := results.step_ms(row, mode, JUDGED, rate)) is not None
                 and (accuracy := results.accuracies(row, mode).get(SEEDS[0])) is not None]
        kept = [f for f in sorted(found) if not any(o[0] < f[0] and o[1] > f[1] for o in found)]
        texts = [f"{title}: {ms:,.0f} ms, {accuracy:.2f} %" for ms, accuracy, title in kept]
        lines.append(f"| {rate:g} | {'; '.join(texts) or 'not run'} |")
    return [*lines, ""]


def better(row, mode, rate, results):
    """The most accurate system that is both predicted to be faster and more accurate by seed 1; None if there is none."""
    ours, accuracy = results.step_ms(row, mode, JUDGED, rate), results.accuracies(row, mode).get(SEEDS[0])
    if ours is None or accuracy is None:
        return None
    found = []
    for other in in_mode(mode):
        theirs, more = results.step_ms(other, mode, JUDGED, rate), results.accuracies(other, mode).get(SEEDS[0])
        if theirs is not None and more is not None and theirs < ours and more > accuracy:
            found.append((more, other.title))
    return max(found)[1] if found else None


def judged(row, results):
    """A row's measurements in a sentence for each network; a loss is called one."""
    for mode in row.modes:
        if not results.accuracies(row, mode):
            tried, diverged = results.tried(row, mode)
            text = f"**loses**: it diverged at {diverged} of {tried} rates" if diverged else "not run yet"
            yield f"{row.title}, {mode}: {text}."
            continue
        loss = results.loss(row, mode)
        is_base = row.name == "none" or not loss
        text = f"{row.title}, {mode}: " + (f"accuracy {spread(results.accuracies(row, mode).values())} %" if is_base
                                           else f"{spread(loss)} points below none")
        times = [results.step_ms(row, mode, JUDGED, rate) for rate in RATES]
        if None in times:
            yield text + "; the codec has not been timed."
            continue
        worse = {rate: other for rate in RATES if (other := better(row, mode, rate, results)) is not None}
        by_other = {}
        for rate, other in worse.items():
            by_other.setdefault(other, []).append(f"{rate:g}")
        if worse:
            text += "; **loses** " + ", ".join(f"at {listed(rates)} Gbit/s to {other}" for other, rates in by_other.items())
        if kept := [f"{rate:g}" for rate in RATES if rate not in worse]:
            text += f"; at {listed(kept)} Gbit/s nothing is both faster and more accurate"
        yield text + "."


def paragraphs(results):
    lines = ["## When to take which", "",
             f"What was measured follows each description. A row *loses* at a rate if another row of the same network is both "
             f"predicted to be faster with {JUDGED} ranks and more accurate in seed {SEEDS[0]}; the most accurate of these is "
             "named. Differences of a few tenths of a point are within what seeds differ by.", ""]
    for family, text in ABOUT.items():
        lines += [text, ""]
        lines += [f"- {sentence}" for row in ROWS.values() if row.family == family for sentence in judged(row, results)]
        lines.append("")
    return lines


def published():
    lines = ["## Published numbers", "",
             "Of other networks, data and schedules than here, so they say how a system can do and not how these runs compare. Only "
             "what was read in public logs, a README or an abstract is listed; for systems that are not listed we have read none.", "",
             "| system | number | read in |", "|---|---|---|"]
    for family, text, where in PUBLISHED:
        title = ABOUT[family].split("**")[1]
        lines.append(f"| {title} | {text} | {where} |")
    return [*lines, ""]


def formula(results, steps_file):
    times = "; ".join(f"{mode}: forward {t.forward:.0f} ms, with backward {t.compute:.0f} ms, update {t.update:.0f} ms"
                      for mode, t in results.steps.items())
    return ["## Predicted time of a step", "",
            "In milliseconds, ResNet-18 of the published width, 32 images a rank, p ranks, each link of the given rate R in each "
            "direction. With F the time of the forward pass, C that of forward and backward pass, U the update, E and D encoding "
            "and decoding, S the sent bytes of an exchange and H the mean number of local steps between two exchanges, a step takes",
            "", "```text",
            "max(C, F + 8 S / R) + U         what travels during the backward pass: none, bf16, fp16, PacTrain",
            "C + E + 8 S / R + D + U         what waits for its end: all others, but",
            "C + (E + 8 S / R + D) / H + U   rare exchanges",
            "```", "",
            f"F, C and U were measured ({times}; `{steps_file.name}` of [exchange.md](exchange.md)). The model leaves out latencies, "
            "what the computing loses while messages are moved, and compressing bucket by bucket (`--compress-by-bucket`); "
            "[scaling.md](scaling.md) has a model with the first two. The least time of a column is bold.", ""]


def machine(known):
    def names(key):
        return ", ".join(sorted({d[key] for d in known.values() if d.get(key)})) or "not known"
    spent = sum(d.get("wall_seconds", 0.0) for d in known.values()) / 3600
    return [f"Machine: {names('machine')}; compiler: {names('compiler')}, release build; commits {names('commit')}. The runs took "
            f"{spent:.1f} hours of two cores. Times are of a shared machine; accuracies do not depend on its load.", "", "```sh",
            "bench/compressors --data DIR", "```", ""]


def lacking(missing):
    """What has not run, row by row."""
    by_row = {}
    for job in missing:
        by_row.setdefault(job.row.title, []).append("codec" if isinstance(job, Timing) else f"{job.mode} {job.rate:g} {job.seed}")
    return [f"{title}: {', '.join(runs)}" for title, runs in by_row.items()]


def write_page(page, jobs, known, steps_file):
    """Returns the jobs that are missing."""
    results = Results(known, step_times(steps_file))
    missing = [job for job in jobs if job not in known]
    lines = [INTRODUCTION, *machine(known)]
    if missing:
        lines += ["Of a run that is missing, the network, the rate and the seed are listed.", "", *not_all(lacking(missing))]
    lines += winners(results)
    for mode in MODES:
        lines += [f"## Bytes and computing: {NAMES[mode]}", "", *bytes_table(mode, results), *copies_goal(mode, results)]
    lines += ["A dash in the columns of encoding and decoding: no code is made after the backward pass. bf16 and fp16 round, and "
              "PacTrain gathers the remaining values, while it runs. A dash in the bytes of rare exchanges: H is not known before a "
              "run.", "", *formula(results, steps_file)]
    for mode in MODES:
        lines += [f"### {NAMES[mode].capitalize()}", "", *step_table(mode, results)]
    lines += ["## Accuracy", "",
              "Payload and milliseconds a step are those of the network of width 16, before and after the switch, two ranks on one "
              f"machine. Seconds to an accuracy are predicted for two hosts joined by {LINK:g} Gbit/s: the measured steps, and for "
              "each the time of its sent bytes, nothing overlapped. Other programs ran on the machine, so steps of the same network "
              "differ for that reason, too: compare encoding and decoding above rather than these columns. The best "
              f"{BEST} rows and the uncompressed ones get three seeds, the others one.", ""]
    for mode in MODES:
        lines += [f"### {NAMES[mode].capitalize()}: width 16, four epochs", "", *accuracy_table(mode, results)]
    lines += [*paragraphs(results), *published(), "## Commands", "", "```sh", *dict.fromkeys(job.shown() for job in known), "```"]
    study_runs.write_text(page, "\n".join(lines).rstrip() + "\n")
    return missing
