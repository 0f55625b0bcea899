# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The page of bench/switch_study, from the JSON files of its runs: docs/results/switch.md and its plots.

`known` maps finished jobs to their documents. Differences are paired by seed: only seeds that both sides have count, and
of these only seeds whose two runs trained alike before the switch.
"""
import json
import math
import shutil
import statistics
import subprocess

import switch_jobs as jobs_of

NOISE = ("Times are of a shared machine. A comparison of times holds to about a tenth; accuracies do not depend on the "
         "machine's load.")


ROUNDING = 1e-9  # of differences of percentages


class Differences(list):
    """Of two rows, a number for each pair of runs of one seed; `unpaired`: there is no pair, and the number is that of the
    means over seeds."""
    unpaired = False


UNPAIRED = "‡"
UNPAIRED_NOTE = (f"{UNPAIRED} marks differences of means over seeds: the two rows have the same seeds, but no two runs of them "
                 "trained alike up to the switch, because their machines have other instruction sets, whose sums round "
                 "differently.")


class Results:
    def __init__(self, known):
        self.rows, self.dense_options = {}, {}
        for job, document in known.items():
            self.rows.setdefault(job.row.key, {})[job.seed] = document
            self.dense_options[job.row.key] = job.dense_options

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

    def trained_alike(self, one, other, seed):
        """Whether the runs of two rows can have had the same steps before the switch."""
        a, b = self.of(one)[seed], self.of(other)[seed]
        same_options = self.dense_options[one] == self.dense_options[other]
        if same_options and None not in (losses := (first_loss(a), first_loss(b))):
            return math.isclose(*losses, rel_tol=1e-9)
        sets = a.get("instruction_set"), b.get("instruction_set")
        return None in sets or sets[0] == sets[1]

    def paired(self, one, other, of, how):
        """how(one's number, other's) for each seed of both that trained alike; without such a seed, of the means over seeds."""
        a, b = self.values(one, of), self.values(other, of)
        both = sorted(a.keys() & b.keys())
        alike = [seed for seed in both if self.trained_alike(one, other, seed)]
        found = Differences(how(a[seed], b[seed]) for seed in alike)
        if both and not alike:
            found.append(how(*(statistics.mean(values[seed] for seed in both) for values in (a, b))))
            found.unpaired = True
        return found


def at(*keys):
    """The number at this place of a document; None without."""
    def find(document):
        for key in keys:
            document = document.get(key) if isinstance(document, dict) else None
        return document
    return find


def first_loss(document):
    """Training loss of the first epoch, equal for two runs with the same steps; None of a low-rank epoch."""
    first = document["history"][0]
    return None if first.get("low_rank") else first.get("train_loss")


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


def spread(values, digits=2):
    """Mean, and in brackets least and most of several."""
    unpaired, values = getattr(values, "unpaired", False), list(values)
    if not values:
        return ""
    text = f"{statistics.mean(values):.{digits}f}"
    mark = f" {UNPAIRED}" if unpaired else ""
    return text + mark if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def whole(values):
    """A count that seeds may differ in."""
    values = list(values)
    if not values:
        return ""
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def minutes(documents):
    """Of the processor a run; of adopted runs without it, of training, marked."""
    spent = [d["cpu_seconds"] if "cpu_seconds" in d else d["training_seconds"] for d in documents]
    mark = "" if all("cpu_seconds" in d for d in documents) else " †"
    return spread((s / 60 for s in spent), 1) + mark if spent else ""


# --- tables ---

def table(rows, results, group):
    metric, dense = group.metric, f"{rows[0].group}-dense"
    lines = [f"| variant | parameters | multiply-adds {group.unit_of_macs} | {metric.title}: seeds | mean (least to most) | worse "
             f"than dense, {metric.unit} | accuracy before the switch; after it; re-estimated | predicted loss | switch after "
             "epochs | ms a step: dense, low rank | processor minutes a run |",
             "|---|---:|---:|---|---:|---:|---|---:|---:|---|---:|"]
    for row in rows:
        documents = results.of(row.key)
        if not documents:
            lines.append(f"| {row.title} | | | not run | | | | | | | |")
            continue
        values = results.values(row.key, at(metric.key))
        gaps = [] if row.key == dense else results.paired(dense, row.key, at(metric.key), metric.loss)
        tested = [spread(v) for part in ("before", "after", "estimated")
                  if (v := results.values(row.key, at("switch", f"accuracy_{part}")).values())]
        predicted = results.values(row.key, at("switch", "predicted_loss")).values()
        when = sorted(set(results.values(row.key, at("switch", "after_epochs")).values()))
        steps = [f"{m:.0f}" for part in ("dense", "low_rank") if (m := results.mean(row.key, at(f"ms_per_step_{part}")))]
        lines.append(
            f"| {row.title} | {whole(results.values(row.key, at('after', 'parameters')).values())} | "
            f"{whole(results.values(row.key, at('after', 'macs')).values())} | "
            f"{', '.join(f'{s}: {v:.2f}' for s, v in values.items())} | {spread(values.values())} | {spread(gaps)} | "
            f"{'; '.join(tested)} | {f'{statistics.mean(predicted):.4f}' if any(predicted) else ''} | "
            f"{', '.join(map(str, when))} | {', '.join(steps)} | {minutes(documents.values())} |")
    return [*lines, ""]


def element_verdict(alone, within):
    """Whether an element pays: every seed says so, alone or among all others."""
    if not alone and not within:
        return "not run yet"
    if max(len(alone), len(within)) < 2:
        return "one seed: no verdict"
    if (alone and min(alone) > 0 and (not within or statistics.mean(within) > 0)) or (
            within and min(within) > 0 and (not alone or statistics.mean(alone) > 0)):
        return "pays"
    if (alone and max(alone) < 0) or (within and max(within) < 0):
        return "**does not pay**: it costs accuracy"
    return "**does not pay**: nothing beyond the seeds' spread"


def elements(results):
    """What each element brings alone, and what all lose without it."""
    def gain(one, other):
        return results.paired(one, other, at("accuracy"), lambda a, b: a - b)
    lines = ["What each element brings, in points of final test accuracy, mean (least to most over seeds). *Alone* adds it to the "
             "truncation with re-estimated batch norms; re-estimation itself is added to nothing, and its use is the accuracy "
             "right after the switch. *Among all* takes it from the run with all five. An element pays here if "
             "it is better in every seed alone, or among all, and not worse in the mean in the other.", "",
             "| element | alone | among all | |", "|---|---:|---:|---|"]
    for name, (title, options) in jobs_of.ELEMENTS.items():
        alone = gain("B-new", "B-none") if name == "norms" else gain(f"B-only-{name}", "B-new")
        within = gain("B-all", f"B-without-{name}")
        verdict = element_verdict(alone, within)
        if name == "norms":
            back = results.paired("B-new", "B-new", lambda d: d.get("switch", {}), lambda s, _: s)
            back = [s["accuracy_estimated"] - s["accuracy_after"] for s in back if "accuracy_estimated" in s]
            if back:
                verdict += f"; right after the switch {spread(back)} points"
        lines.append(f"| {title} (`{options}`) | {spread(alone)} | {spread(within)} | {verdict} |")
    together = gain("B-all", "B-new")
    if together:
        lines += ["", f"All together against the truncation with re-estimated batch norms: {spread(together)} points."]
    return [*lines, ""]


def full_width(rows, results):
    """Times and memory instead of accuracies."""
    lines = ["Mean (least to most over seeds).", "",
             "| network | parameters | multiply-adds an image | ms a step: epoch 1 | epoch 2, with statistics if two-sided | low "
             "rank | epoch 2 against epoch 1, % | switch, ms | peak memory, MiB | processor minutes a run |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        def numbers(of, digits=0, row=row):
            return spread(results.values(row.key, of).values(), digits)
        if not (documents := results.of(row.key).values()):
            lines.append(f"| {row.title} | | | not run | | | | | | |")
            continue
        cells = [whole(results.values(row.key, at("after", what)).values()) for what in ("parameters", "macs")]
        cells += [numbers(lambda d, i=i: d["history"][i]["ms_per_step"]) for i in (0, 1)]
        cells += [numbers(lambda d: d["ms_per_step_low_rank"] if "switch" in d else None),
                  numbers(lambda d: 100 * (slowdown(d) - 1), 1), numbers(at("switch", "milliseconds")), numbers(at("peak_mib"))]
        lines.append(f"| {row.title} | {' | '.join(cells)} | {minutes(documents)} |")
    return [*lines, ""]


def step_times(results):
    lines = ["| pair | machine | today's way, ms a step | two-sided, ms a step | ratio |", "|---|---|---:|---:|---:|"]
    theirs, ours = results.of("T-today"), results.of("T-new")
    for seed in sorted(theirs.keys() & ours.keys()):
        times = [d[seed]["ms_per_step_low_rank"] for d in (theirs, ours)]
        lines.append(f"| {seed} | {ours[seed]['machine']} | {times[0]:.1f} | {times[1]:.1f} | {times[1] / times[0]:.3f} |")
    return [*lines, ""] if len(lines) > 2 else ["Not run yet.", ""]


# --- goals ---

def goals(results):
    """(goal, what there is, whether it is met; None if not known)"""
    def gap(group, row, most):
        metric = jobs_of.GROUPS[group].metric
        gaps = results.paired(f"{group}-dense", f"{group}-{row}", at(metric.key), metric.loss)
        return spread(gaps), statistics.mean(gaps) <= most + ROUNDING if gaps else None

    def size(key, most):
        counts = results.values(key, at("after", "parameters")).values()
        dense = results.mean(f"{key.split('-', maxsplit=1)[0]}-dense", at("after", "parameters"))
        if not counts or dense is None:
            return "", None
        share = max(counts) / dense
        return f"{100 * share:.2f} %", round(share, 4) <= most

    yield "ResNet, 12 epochs: at most 0.3 points worse than dense", *gap("A", "new", 0.3)
    counts = results.values("A-new", at("after", "parameters")).values()
    yield ("ResNet: no more parameters than today's way", whole(counts),
           max(counts) <= jobs_of.TODAY_PARAMETERS if counts else None)
    macs = results.values("A-new", at("after", "macs")).values()
    yield ("ResNet: at most 1.1 times today's multiply-adds", f"{max(macs) / jobs_of.TODAY_MACS:.3f}" if macs else "",
           max(macs) <= 1.1 * jobs_of.TODAY_MACS if macs else None)
    ratios = results.paired("T-new", "T-today", at("ms_per_step_low_rank"), lambda a, b: a / b)
    yield ("ResNet: at most 1.1 times today's time a step, in turns", spread(ratios, 3),
           statistics.mean(ratios) <= 1.1 if ratios else None)
    for after, words in (("after", "statistics as they were"), ("estimated", "re-estimated")):
        yield (f"ResNet, right after the switch, {words}: at most half of plain truncation's loss in accuracy",
               *half_of("A-plain", "A-new", drop(after), results))
    yield "ResNet, four epochs: at most 0.7 points worse than dense", *gap("A2", "new", 0.7)
    yield "Transformer at today's 72.0 %: at most 0.4 BLEU worse than dense", *gap("C", "new", 0.4)
    yield "Transformer at today's parameters", *size("C-new", 0.7197)
    ours, scratch = (results.mean(f"C-{row}", at("bleu")) for row in ("new", "lowrank"))
    yield ("Transformer: above low rank from scratch", "" if None in (ours, scratch) else f"{ours:.2f} against {scratch:.2f}",
           None if None in (ours, scratch) else ours > scratch)
    yield "Transformer with embeddings: at most 0.8 BLEU worse than dense", *gap("C", "embeddings", 0.8)
    yield "Transformer with embeddings: at most 55 % of the parameters", *size("C-embeddings", 0.55)
    yield "LSTM: at most 1 % of perplexity worse than dense", *gap("D", "new", 1.0)
    yield "LSTM with factorized embedding: at most 2 % of perplexity worse than dense", *gap("D", "embeddings", 2.0)
    yield "LSTM with factorized embedding: at most 45 % of the parameters", *size("D-embeddings", 0.45)
    for group, name in (("E", "Fashion-MNIST"), ("E2", "digits")):
        gains = results.paired(f"{group}-new", f"{group}-today", at("accuracy"), lambda a, b: a - b)
        yield f"{name}: not worse than today's way, points better", spread(gains), statistics.mean(gains) >= -ROUNDING if gains else None
    shares = results.paired("F-new", "F-today", slowdown, lambda ours, drift: 100 * (ours / drift - 1))
    yield ("full width: statistics at most 2 % of the time of a warm-up step", f"{spread(shares)} %" if shares else "",
           statistics.mean(shares) <= 2 if shares else None)
    ratios = results.paired("F-new", "F-today", at("switch", "milliseconds"), lambda a, b: a / b)
    yield "full width: switch at most 1.5 times today's", spread(ratios, 3), statistics.mean(ratios) <= 1.5 if ratios else None


def half_of(plain, ours, of, results):
    theirs, mine = results.mean(plain, of), results.mean(ours, of)
    if theirs is None or mine is None:
        return "", None
    # Re-estimated statistics may bring more than the truncation takes; then there is no loss to halve.
    return f"{mine:.2f} against {theirs:.2f} points", mine <= 0.5 * max(theirs, 0.0)


def goal_table(results):
    words = {None: "not run yet", True: "met", False: "**missed**"}
    lines = ["| goal | result | |", "|---|---|---|"]
    lines += [f"| {goal} | {have} | {words[met]} |" for goal, have, met in goals(results)]
    return [*lines, ""]


def choices(results):
    """What the tables say to someone who has to choose, with the numbers that say it."""
    def gain(one, other):
        return spread(results.paired(one, other, at("accuracy"), lambda a, b: a - b)) or "no run"

    def macs(one, other):
        ours, theirs = (results.mean(key, at("after", "macs")) for key in (one, other))
        return f"{ours / theirs:.2f} times" if ours and theirs else "not measured"
    return [
        "## What to choose", "",
        "Points of test accuracy in the short runs (ResNet-18 of width 16), mean (least to most over seeds):", "",
        "| instead of | choose | accuracy | it costs |", "|---|---|---:|---|",
        f"| plain truncation | two-sided factors at the same layers and ranks, the default | "
        f"{gain('B-two-today', 'B-today')} | the statistics of 20 steps; parameters, multiply-adds and bytes are the same |",
        f"| plain truncation at ratio 1/4 | `--policy two-sided`: the layers share the same parameters | "
        f"{gain('B-share', 'B-plain')} | {macs('B-share', 'B-plain')} the multiply-adds: ranks move to large images |",
        f"| first two stages dense, by hand | `--policy two-sided` | {gain('B-share', 'B-today')} | fewer parameters, "
        f"{macs('B-share', 'B-today')} the multiply-adds |",
        f"| a switch after a third of the epochs | one after half of them | {gain('B-after-3', 'B-new')} | dense steps, and the bytes "
        "of their gradients |", "",
        "The programs' default, `--policy uniform`, is the first row: the paper's layers and ranks, so its parameters, "
        "multiply-adds and bytes, with two-sided factors. `factorize_policy` does the same where a run has statistics "
        "(`switching.statistics_steps`). The paper's way is `--policy paper`, or `factorize_policy::paper()`. Sharing ratio 1/4's "
        "parameters *and* multiply-adds among the layers (row *two-sided, ratio 1/4's parameters and multiply-adds shared*) gained "
        "nothing over its own ranks in the mean, so ranks are shared only on request. The elements that follow a switch are off by "
        "default; the table of elements says which of them pay.", ""]


# --- trained networks, by bench/trained_model ---

def trained(raw):
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(raw.glob("trained-*.json"))]
    lines = ["## A trained network, factorized and not trained again", "",
             "ResNet-18 of width 16 of the headline, trained dense for 12 epochs; its file is factorized by `factorize_weights` "
             "(all layers allowed, `--budget`) and tested by `predict`. Batch norms keep their running statistics. *Plain* takes "
             "ranks by each weight's own energy and reads no statistics; the others read those of 20 batches. Accuracy in "
             "percent, mean (least to most over seeds).", "", "```sh", "bench/trained_model --data DIR", "```", ""]
    if not documents:
        return [*lines, "Not run yet.", ""]
    ways = list(dict.fromkeys(row["way"] for d in documents for row in d["rows"]))
    lines += [f"Seeds {', '.join(str(d['seed']) for d in documents)}; dense "
              f"{spread(d['accuracy'] for d in documents)} %, {documents[0]['elements']:,} numbers in the file.", "",
              f"| numbers that are left | {' | '.join(ways)} |", "|---" + "|---:" * len(ways) + "|"]
    for share in dict.fromkeys(row["share"] for d in documents for row in d["rows"]):
        cells = [spread(row["accuracy"] for d in documents for row in d["rows"] if (row["share"], row["way"]) == (share, way))
                 for way in ways]
        lines.append(f"| {100 * share:.0f} % | {' | '.join(cells)} |")
    return [*lines, ""]


# --- plots ---

AXES = {"parameters": ("parameters / 1000", 1e-3), "macs": ("multiply-adds an image / million", 1e-6)}


def pareto(raw, group, rows, results):
    """Draws accuracy against parameters and multiply-adds by gnuplot; names of the files."""
    drawn = []
    families = {}
    for row in rows:
        if row.family and row.family != "dense" and results.of(row.key):
            families.setdefault(row.family, []).append(row)
    if not families:
        return drawn
    for axis, (label, scale) in AXES.items():
        file = f"pareto-{group}-{axis}.svg"
        if shutil.which("gnuplot") is None:
            drawn += [file] if (raw / file).is_file() else []
            continue
        text = (f"set terminal svg size 760,480 dynamic background rgb 'white'\nset output '{file}'\nset grid\n"
                f"set xlabel '{label}'\nset ylabel 'test accuracy / %'\nset key outside bottom center horizontal\n")
        plots = []
        for i, (family, members) in enumerate(families.items()):
            points = []
            for row in members:
                values = list(results.values(row.key, at("accuracy")).values())
                points.append((scale * results.mean(row.key, at("after", axis)), statistics.mean(values), min(values), max(values)))
            text += f"$c{i} << EOD\n" + "".join(" ".join(f"{v:.6g}" for v in p) + "\n" for p in sorted(points)) + "EOD\n"
            plots.append(f"$c{i} using 1:2:3:4 with yerrorlines lw 1.5 pt {i + 4} ps 0.8 lc {i + 1} title '{family}'")
        dense = results.mean(f"{group}-dense", at("accuracy"))
        if dense is not None:
            plots.append(f"{dense:.4f} with lines dt 2 lc rgb 'gray40' title 'dense'")
        text += "plot " + ", ".join(plots) + "\n"
        if subprocess.run(["gnuplot"], input=text, text=True, cwd=raw, check=False).returncode == 0:
            drawn.append(file)
    return drawn


def switch_plot(raw, results):
    """Draws what the headline's switch did, layer by layer: ranks, and what is dropped; the file's name, or none."""
    file = "layers-A-new.svg"
    documents = results.of("A-new")
    layers = documents[min(documents)].get("switch", {}).get("layers", []) if documents else []
    if not layers or any(not layer.get("predicted_loss") for layer in layers):
        return None
    if shutil.which("gnuplot") is None:
        return file if (raw / file).is_file() else None
    rows = "".join(f'"{layer["name"]}" {layer["rank"] / min(layer["rows"], layer["cols"]):.6g} {1 - layer["kept_energy"]:.6g} '
                   f'{1 - layer["weighted_energy"]:.6g} {layer["predicted_loss"]:.6g} {layer["rank"]}\n' for layer in layers)
    text = (f"set terminal svg size 860,600 dynamic background rgb 'white'\nset output '{file}'\n$d << EOD\n{rows}EOD\n"
            "set multiplot\nset size 1,0.42\nset origin 0,0.58\nset grid ytics\nset style fill solid 0.6 noborder\nset boxwidth 0.7\n"
            f"set xrange [-0.7:{len(layers) - 0.3}]\nset lmargin 12\nset bmargin 1\nset xtics format ''\n"
            "set ylabel 'rank / full rank'\nset yrange [0:*]\nset key top left\n"
            "plot $d using 0:2 with boxes lc rgb '#4878a8' notitle, $d using 0:2:6 with labels offset 0,0.6 font ',9' notitle\n"
            "set size 1,0.6\nset origin 0,0\nset bmargin 6\nset xtics rotate by -40 font ',9'\nset logscale y\nset format y '10^{%L}'\nset yrange [*:*]\n"
            "set ylabel 'share dropped; loss'\nset key outside top center horizontal\n"
            "plot $d using 0:3:xtic(1) with linespoints lc rgb 'gray50' pt 4 title 'share of the weight that is dropped', "
            "$d using 0:4 with linespoints lc rgb '#4878a8' pt 7 title 'share of the loss-weighted energy', "
            "$d using 0:5 with linespoints lc rgb '#c03030' pt 9 title 'predicted loss'\nunset multiplot\n")
    return file if subprocess.run(["gnuplot"], input=text, text=True, cwd=raw, check=False).returncode == 0 else None


# --- the page ---

def surroundings(known):
    """Machine, compiler, minutes."""
    def names(key):
        return ", ".join(sorted({d[key] for d in known.values() if d.get(key)})) or "not known"
    spent = sum(d.get("cpu_seconds", 0.0) for d in known.values()) / 60
    adopted = [d for d in known.values() if "adopted_from" in d]
    lines = [f"Machine: {names('machine')}; compiler: {names('compiler')}, release build; commits {names('commit')}. All runs have "
             f"one thread and one rank; results do not depend on the number of threads. {NOISE} The runs that measured it took "
             f"{spent:.0f} minutes of the processor (user and system, loading and tests included)."]
    if adopted:
        unmeasured = [d for d in adopted if "cpu_seconds" not in d]
        text = f"{len(adopted)} of {len(known)} results were adopted from earlier runs of the same options"
        if unmeasured:
            text += (f"; {len(unmeasured)} of them have no processor time, and the tables show their time of training and tests "
                     f"instead (†), {sum(d['training_seconds'] for d in unmeasured) / 60:.0f} minutes in all, nor a record of "
                     "their machine")
        lines.append(text + ".")
    return [*lines, ""]


def section(name, rows, results, raw):
    group = jobs_of.GROUPS[name]
    lines = [f"## {group.title}", "", group.about, ""]
    if name == "F":
        return [*lines, *full_width(rows, results)]
    if name == "T":
        return [*lines, *step_times(results)]
    for part in dict.fromkeys(row.section for row in rows):
        members = [row for row in rows if row.section == part]
        base = [r for r in rows if r.name in ("dense", "new") and part and r not in members]
        lines += [*([f"### {part}", ""] if part else []), *table([*base, *members], results, group)]
        if part == "After the switch":
            lines += elements(results)
    if name == "A" and (file := switch_plot(raw, results)):
        lines += ["What the new switch did, layer by layer (the first seed of *two-sided, today's parameters*; numbers above the "
                  "bars are ranks, layers that are not shown stay dense):", "",
                  f"![ranks, and what is dropped, of each layer](switch/{file})", ""]
    for file in pareto(raw, name, rows, results):
        lines += [f"![test accuracy against {'parameters' if 'parameters' in file else 'multiply-adds'}](switch/{file})", ""]
    return lines


def write_page(page, raw, jobs, known):
    """Writes page and plots; returns the rows and seeds that are missing, as text."""
    raw.mkdir(parents=True, exist_ok=True)
    results = Results(known)
    rows = list(dict.fromkeys(job.row for job in jobs))
    absent = {}
    for job in jobs:
        if job not in known:
            absent.setdefault(job.row.key, []).append(str(job.seed))
    missing = ", ".join(f"{key} ({'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)})" for key, seeds in absent.items())
    lines = ["<!-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception -->",
             "<!-- Written by bench/switch_study; the numbers are those of switch/*.json. -->",
             "# What the switch to low rank costs", "",
             "This page shows how much accuracy a network loses by the switch from dense layers to low-rank factors, for each way "
             "of truncating, of choosing ranks and of going on, so that you can choose one. *Plain* truncation keeps as much "
             "of the weights as it can, *data-aware* of the layers' outputs, *two-sided* of the loss; *shared* ranks and "
             "budgets put ranks where they save most of it. Accuracies are those of the last epoch, never the best over epochs. "
             "Differences are between runs of the same seed, given as mean (least to most). " + UNPAIRED_NOTE, "",
             *surroundings(known), "```sh", "meson setup build -Dbuildtype=release -Dmarch=native && ninja -C build",
             "bench/switch_study --data DIR", "```", ""]
    if missing:
        lines += [f"**Not all has run.** Missing: {missing}.", ""]
    lines += ["## Goals", "", *goal_table(results), *choices(results)]
    for name in jobs_of.GROUPS:
        lines += section(name, [row for row in rows if row.group == name], results, raw)
    lines += trained(raw)
    lines += ["## Commands", "", "Of the first seed. `HALF` and `TINY` are the reduced data sets that bench/switch_study writes.",
              "", "```sh", *(jobs_of.Job(row, row.seeds[0]).shown() for row in rows), "```"]
    aside = page.with_name(page.name + ".tmp")
    aside.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    aside.replace(page)
    return missing
