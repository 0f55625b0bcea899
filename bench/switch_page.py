# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The page of bench/switch_study, from the JSON files of its runs: docs/results/switch.md and its plots.

`known` maps finished jobs to their documents.
"""
import json
import statistics

import curve_runs
import gnuplot
import switch_goals
import switch_jobs as jobs_of
from switch_results import MARKS, Results, at, minutes, slowdown, spread, step_of, whole

NOISE = ("Times are of a shared machine. A comparison of times holds to about a tenth; accuracies do not depend on the "
         "machine's load.")


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
        gap = "" if row.key == dense else results.worse(dense, row.key).text
        tested = [spread(v) for part in ("before", "after", "estimated")
                  if (v := results.values(row.key, at("switch", f"accuracy_{part}")).values())]
        predicted = results.values(row.key, at("switch", "predicted_loss")).values()
        when = sorted(set(results.values(row.key, at("switch", "after_epochs")).values()))
        steps = [f"{m:.0f}" for part in ("dense", "low_rank") if (m := results.mean(row.key, step_of(part)))]
        lines.append(
            f"| {row.title} | {whole(results.values(row.key, at('after', 'parameters')).values())} | "
            f"{whole(results.values(row.key, at('after', 'macs')).values())} | "
            f"{', '.join(f'{s}: {v:.2f}' for s, v in values.items())} | {spread(values.values())} | {gap} | "
            f"{'; '.join(tested)} | {f'{statistics.mean(predicted):.4f}' if any(predicted) else ''} | "
            f"{', '.join(map(str, when))} | {', '.join(steps)} | {minutes(documents.values())} |")
    return [*lines, "", *neighbours(rows, results, group)]


def neighbours(rows, results, group):
    """Rows against those that they vary, and rows with a raised rate against the dense network with that rate."""
    titles = {row.name: row.title for row in jobs_of.all_rows() if row.group == rows[0].group}
    lines, alone = [], []
    for row in rows:
        for other in filter(None, (row.beside, row.same_rate)):
            if gap := results.worse(f"{row.group}-{other}", row.key):
                lines.append(f"| {row.title} | {titles[other]} | {gap.text} |")
        if results.of(row.key) and row.raises_rate and not row.same_rate:
            alone.append(f"*{row.title}*")
    if lines:
        lines = [f"| variant | against | worse, {group.metric.unit} |", "|---|---|---:|", *lines, ""]
    if alone:
        lines += [f"The rate is raised at the switch in {', '.join(alone)}. No dense network was trained with a raised rate in this "
                  "group, so the gain may be the rate's.", ""]
    return lines


def element_verdict(alone, within):
    """Whether an element pays: every seed says so, alone or among all others. Differences that say nothing do not count."""
    if not alone and not within:
        return "not run yet"
    if max(len(d) for d in (alone, within) if d) < 2:
        return "other machines: no verdict" if alone.unpaired or within.unpaired else "one seed: no verdict"
    alone, within = ([] if d.few or d.unpaired else d for d in (alone, within))
    if not alone and not within:
        return "too few seeds: no verdict"
    if (alone and min(alone) > 0 and (not within or statistics.mean(within) > 0)) or (
            within and min(within) > 0 and (not alone or statistics.mean(alone) > 0)):
        return "pays"
    if (alone and max(alone) < 0) or (within and max(within) < 0):
        return "**does not pay**: it costs accuracy"
    return "**does not pay**: nothing beyond the seeds' spread"


def elements(results):
    """What each element brings alone, and what all lose without it."""
    lines = ["What each element brings, in points of final test accuracy, mean (least to most over seeds). *Alone* adds it to the "
             "truncation with re-estimated batch norms; re-estimation itself is added to nothing, and its use is the accuracy "
             "right after the switch. *Among all* takes it from the run with all five, to which the last two do not belong. An "
             "element pays here if it is better in every seed alone, or among all, and not worse in the mean in the other.", "",
             "| element | alone | among all | |", "|---|---:|---:|---|"]
    for name, (title, options) in {**jobs_of.ELEMENTS, **jobs_of.ALONE}.items():
        alone = results.better(*(("B-new", "B-none") if name == "norms" else (f"B-only-{name}", "B-new")))
        within = results.better("B-all", f"B-without-{name}")
        verdict = element_verdict(alone, within) + (right_after(results) if name == "norms" else "")
        lines.append(f"| {title} (`{options}`) | {alone.text} | {within.text} | {verdict} |")
    if together := results.better("B-all", "B-new"):
        lines += ["", f"All five together against the truncation with re-estimated batch norms: {together.text} points."]
    return [*lines, ""]


def right_after(results):
    """What the re-estimation of batch norms brings before the network is trained further."""
    switches = (d.get("switch", {}) for d in results.of("B-new").values())
    back = [s["accuracy_estimated"] - s["accuracy_after"] for s in switches if "accuracy_estimated" in s]
    return f"; right after the switch {spread(back)} points" if back else ""


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


# --- trained networks, by bench/trained_model ---

def trained_where(documents):
    """Machine and processor time of these networks."""
    def names(key):
        return ", ".join(sorted({d[key] for d in documents if d.get(key)})) or "not known"
    spent = [d["cpu_seconds"] / 60 for d in documents if d.get("cpu_seconds")]
    took = f"{spread(spent, 1)} processor minutes a seed" if spent else "processor time not recorded"
    if spent and len(spent) < len(documents):
        took += f", of {len(spent)} of {len(documents)} seeds; of the others it is not recorded"
    return f"Machine: {names('machine')}; commits {names('commit')}; {took}."


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
              f"{spread(d['accuracy'] for d in documents)} %, {documents[0]['elements']:,} numbers in the file. "
              f"{trained_where(documents)}", "",
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
        curves = []
        for i, (family, members) in enumerate(families.items()):
            points = []
            for row in members:
                values = list(results.values(row.key, at("accuracy")).values())
                points.append((scale * results.mean(row.key, at("after", axis)), statistics.mean(values), min(values), max(values)))
            curves.append((sorted(points), f"using 1:2:3:4 with yerrorlines lw 1.5 pt {i + 4} ps 0.8 lc {i + 1} title '{family}'"))
        dense = results.mean(f"{group}-dense", at("accuracy"))
        if dense is not None:
            curves.append((None, f"{dense:.4f} with lines dt 2 lc rgb 'gray40' title 'dense'"))
        if gnuplot.draw(raw / file, "760,480", f"set xlabel '{label}'\nset ylabel 'test accuracy / %'\n"
                        "set key outside top center horizontal", curves):
            drawn.append(file)
    return drawn


def switch_plot(raw, results):
    """Draws what the headline's switch did, layer by layer: ranks, and what is dropped; the file's name, or none."""
    file = "layers-A-new.svg"
    documents = results.of("A-new")
    layers = documents[min(documents)].get("switch", {}).get("layers", []) if documents else []
    if not layers or any(not layer.get("predicted_loss") for layer in layers):
        return None
    rows = "".join(f'"{layer["name"]}" {layer["rank"] / min(layer["rows"], layer["cols"]):.6g} {1 - layer["kept_energy"]:.6g} '
                   f'{1 - layer["weighted_energy"]:.6g} {layer["predicted_loss"]:.6g} {layer["rank"]}\n' for layer in layers)
    text = (f"$d << EOD\n{rows}EOD\n"
            "set multiplot\nset size 1,0.42\nset origin 0,0.58\nset grid ytics\nset style fill solid 0.6 noborder\nset boxwidth 0.7\n"
            f"set xrange [-0.7:{len(layers) - 0.3}]\nset lmargin 12\nset bmargin 1\nset xtics format ''\n"
            "set ylabel 'rank / full rank'\nset yrange [0:*]\nset key top left\n"
            "plot $d using 0:2 with boxes lc rgb '#4878a8' notitle, $d using 0:2:6 with labels offset 0,0.6 font ',9' notitle\n"
            "set size 1,0.6\nset origin 0,0\nset bmargin 6\nset xtics rotate by -40 font ',9'\nset logscale y\nset format y '10^{%L}'\nset yrange [*:*]\n"
            "set ylabel 'share dropped; loss'\nset key outside top center horizontal\n"
            "plot $d using 0:3:xtic(1) with linespoints lc rgb 'gray50' pt 4 title 'share of the weight that is dropped', "
            "$d using 0:4 with linespoints lc rgb '#4878a8' pt 7 title 'share of the loss-weighted energy', "
            "$d using 0:5 with linespoints lc rgb '#c03030' pt 9 title 'predicted loss'\nunset multiplot")
    return file if gnuplot.run(raw / file, "860,600", text) else None


# --- the page ---

def surroundings(known):
    """Machine, compiler, minutes."""
    def names(key):
        return ", ".join(sorted({d[key] for d in known.values() if d.get(key)})) or "not known"
    spent = sum(d.get("cpu_seconds", 0.0) for d in known.values() if "device" not in d) / 60
    adopted = [d for d in known.values() if "adopted_from" in d]
    recorded = sum("instruction_set" in d for d in known.values())
    lines = [f"Machine: {names('machine')}; instruction set: {names('instruction_set')} (recorded by {recorded} of {len(known)} "
             f"runs); compiler: {names('compiler')}, release build; commits {names('commit')}. All runs have one thread and one rank; results do not "
             f"depend on the number of threads, but on the instruction set. {NOISE} The runs that measured it took {spent:.0f} "
             "minutes of the processor (user and system, loading and tests included)."]
    if adopted:
        unmeasured = [d for d in adopted if "cpu_seconds" not in d]
        text = f"{len(adopted)} of {len(known)} results were adopted from earlier runs of the same options"
        if unmeasured:
            text += (f"; {len(unmeasured)} of them have no processor time, and the tables show their time of training and tests "
                     f"instead (†), {sum(d['training_seconds'] for d in unmeasured) / 60:.0f} minutes in all, nor a record of "
                     "their machine")
        lines.append(text + ".")
    if devices := [job.row.group for job, d in known.items() if "device" in d]:
        lines.append(f"An NVIDIA device trained {len(devices)} runs in fp32 (groups: {', '.join(sorted(set(devices)))}). Several shared it, "
                     "so that the tables have no times of them.")
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
             "budgets put ranks where they save most of it. *Today's way* and *today's advice* are the library's way when the study "
             "began, now `--policy paper`: plain truncation at rank ratio 1/4, in the ResNet with the first two stages dense. "
             "*Today's parameters* are those of that network. Accuracies are those of the last epoch, never the best over epochs. "
             f"Differences are between runs of the same seed, given as mean (least to most). {MARKS}", "",
             *surroundings(known), "```sh", "meson setup build -Dbuildtype=release -Dmarch=native && ninja -C build",
             "bench/switch_study --data DIR", "```", ""]
    if missing:
        lines += [f"**Not all has run.** Missing: {missing}.", ""]
    lines += ["## Goals", "", *switch_goals.goal_table(results, curve_runs.kept(raw.parent / "exchange_curves")),
              *switch_goals.choices(results)]
    for name in jobs_of.GROUPS:
        lines += section(name, [row for row in rows if row.group == name], results, raw)
    lines += trained(raw)
    lines += ["## Commands", "", "Of the first seed. `HALF` and `TINY` are the reduced data sets that bench/switch_study writes.",
              "", "```sh", *(jobs_of.Job(row, row.seeds[0]).shown() for row in rows), "```"]
    aside = page.with_name(page.name + ".tmp")
    aside.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    aside.replace(page)
    return missing
