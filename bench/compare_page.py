# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes docs/results/cpu.md and its plots from the numbers that bench/compare left in docs/results/cpu/."""
import collections
import json
import math
import statistics

import gnuplot

VECTOR = 16  # floats; neighbouring ranks within one cost the same


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(v) for v in values))


def number(value, digits=1):
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows), ""]


def load(raw):
    """section -> threads -> content."""
    found = {}
    for path in sorted(raw.glob("*-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(content["section"], {})[content["threads"]] = content
    return dict(sorted(found.items()))


def cell(result, least):
    return f"**{number(result['ms'])}**" if result["ms"] == least else number(result["ms"])


def contestants_of(rows):
    names = []
    for row in rows:
        names += [n for n in row["results"] if n not in names]
    return names


def least_of(row):
    return min((r["ms"] for r in row["results"].values()), default=0)


def ratio_text(row):
    if "ratio_to_best_peer" not in row:
        return "-"
    return f"{number(row['ratio_to_best_peer'], 2)} ({row['best_peer']})"


def disturbed_mark(row):
    share = row.get("others_share", 0.0)
    return f" (disturbed: others used {100 * share:.0f} %)" if share > 0.03 else ""


def comparison_table(first, rows):
    """A row for each work: the time of each candidate, the best one bold, and the ratio to the best peer."""
    names = contestants_of(rows)
    lines = [[row["work"] + disturbed_mark(row), *(cell(row["results"][n], least_of(row)) if n in row["results"] else "-" for n in names),
              ratio_text(row)] for row in rows]
    return table([first, *(f"{n}, ms" for n in names), "ratio to best peer"], lines)


def turned_table(first, rows):
    """The same with a row for each contestant."""
    lines = [[n, *(cell(row["results"][n], least_of(row)) if n in row["results"] else "-" for row in rows)]
             for n in contestants_of(rows)]
    lines.append(["ratio of the best peer to ours", *(ratio_text(row) for row in rows)])
    return table([first, *(row["work"] + disturbed_mark(row) for row in rows)], lines)


# ------------------------------------------------------------------ sections

def gemm_section(content):
    rows = content["rows"]
    lines = comparison_table("product, M x N x K", rows)
    names = contestants_of(rows)
    lines += ["Percent of the peak measured beside each row:", ""]
    shares = [[row["work"], *(number(100 * row["operations"] / (row["results"][n]["ms"] * 1e6) / row["peak_gflops"])
                              if n in row["results"] else "-" for n in names)] for row in rows]
    return lines + table(["product", *names], shares)


def gemm_bf16_section(content):
    return [*comparison_table("product, M x N x K", content["rows"]), "Operands are bfloat16, sums float. Weight gradients are "
            "float, those of PyTorch bfloat16; all other products are bfloat16.", ""]


def conv_sums(content):
    """Times over all layers (as often as the network has them), and ratios to ours that drift does not touch."""
    sums, ratios = {}, {}
    rows = [r for r in content["rows"] if "ours" in r["results"]]
    ours = sum(r["count"] * r["results"]["ours"]["ms"] for r in rows)
    names = set.intersection(*(set(r["results"]) for r in rows)) if rows else set()
    for name in names:
        sums[name] = sum(r["count"] * r["results"][name]["ms"] for r in rows)
        if name != "ours":
            ratios[name] = sum(r["count"] * r["results"]["ours"]["ms"] * r["ratios"][name] for r in rows) / ours
    return sums, ratios


def conv_section(content):
    lines = turned_table(f"ms; batch {content['batch']}, forward + both gradients", content["rows"])
    sums, ratios = conv_sums(content)
    bound = sum(r["count"] * r["results"]["ours"].get("bound_ms", 0) for r in content["rows"] if "ours" in r["results"])
    lines += [f"Summed over the {sum(r['count'] for r in content['rows'])} factorized layers of ResNet-18"
              + (f" (bound of the machine, direct: {number(bound)} ms)" if bound else "") + ":", ""]
    order = sorted(sums, key=sums.get)
    lines += table(["", "ms", "ratio to ours"], [[n, number(sums[n]), number(ratios.get(n, 1.0), 2)] for n in order])
    lines.append("oneDNN runs in the layouts that it likes best, and getting data into them is not counted.")
    narrow = content["section"] == "conv_bf16"
    if narrow:
        lines.append("Inputs, outputs and weights are bfloat16, sums float; gradients of weights are float, PyTorch's bfloat16.")
    else:
        lines.append("oneDNN's Winograd does fewer multiplications than the bound counts, at a larger rounding error.")
    lines += [f"{name} has no Winograd algorithm{' for bfloat16' if narrow else ''} on this machine: `{told}`." for name, told in
              content.get("winograd_refused", {}).items()]
    return [*lines, ""]


def step_section(content):
    lines = turned_table(f"ms; batch {content['batch']}", content["rows"])
    shown = []
    for row in content["rows"]:
        ours = row["results"].get("ours", {})
        shown.append([row["work"], f"{ours.get('parameters', 0):,}", number(ours.get("ms")), number(ours.get("bound_ms")),
                      number(100 * ours["bound_ms"] / ours["ms"] if ours else None),
                      number(row.get("hybrid_to_dense"), 3) if "hybrid_to_dense" in row else "-"])
    return lines + table(["ours", "parameters", "ms", "bound of the convolutions, ms", "percent", "hybrid / dense"], shown)


def bf16_section(content):
    lines = []
    for first, rows in ((f"ms; batch {content['batch']}", [r for r in content["rows"] if "batch" not in r]),
                        ("ms", [r for r in content["rows"] if "batch" in r])):
        lines += turned_table(first, rows) if rows else []
    shown = [[row["work"], number(row["results"]["ours, float"]["ms"] / row["results"]["ours"]["ms"], 2)]
             for row in content["rows"] if {"ours", "ours, float"} <= set(row["results"])]
    lines += table(["ours", "time in float / time in bfloat16"], shown)
    return [*lines, "`ours` and PyTorch compute in bfloat16 (PyTorch under `autocast`), with float parameters.", ""]


def sequences_section(content):
    lines = turned_table("ms", content["rows"])
    shown = []
    for row in content["rows"]:
        ours = row["results"].get("ours")
        if ours:
            shown.append([row["work"], ours["items"], str(ours["tokens"]), f"{ours['parameters']:,}", number(ours["ms"]),
                          number(1e3 * ours["tokens"] / ours["ms"], 0), number(ours["bound_ms"]),
                          number(100 * ours["bound_ms"] / ours["ms"]),
                          number(row["to_dense"], 3) if "to_dense" in row else "-"])
    lines += table(["ours", "a step", "tokens", "parameters", "ms", "tokens a second", "bound of the products, ms", "percent",
                    "to dense"], shown)
    return [*lines, "A step is forward, loss, backward and the paper's optimizer: for the LSTM dropout 0.65, a clipped gradient "
            "and SGD, for the Transformer dropout 0.1, label smoothing and Adam. PyTorch's dense LSTM is `nn.LSTM`, its "
            "low-rank one is written for speed: the input side of all steps at once, the second factors of all gates in one "
            "batched product.", ""]


def inference_section(content):
    lines = comparison_table("ms a batch", content["rows"])
    shown = []
    for row in content["rows"]:
        ours = row["results"].get("ours")
        others = [row["results"].get(f"ours, {form}") for form in ("packed in each pass", "batch norms kept")]
        if ours:
            shown.append([row["work"], f"{ours['parameters']:,}", number(1e3 * row["batch"] / ours["ms"], 0),
                          number(100 * ours["bound_ms"] / ours["ms"]),
                          *(number(r["ms"] / ours["ms"], 2) if r else "-" for r in others)])
    lines += table(["ours", "parameters", "images a second", "% of the convolutions' bound",
                    "time if weights are packed in each pass", "and batch norms kept"], shown)
    return [*lines, "Forward passes alone; the bound is that of direct sums, which Winograd's can pass. Ours is a "
            "`frozen_model` with batch norms folded into the layers before them, unless it says otherwise; merged factors take the dense network's time. PyTorch: channels last, `inference_mode`; frozen is "
            "`torch.jit.optimize_for_inference` of the traced network, which folds batch norms, too.", ""]


def svd_section(content):
    results = content["rows"][0]["results"]
    rows = [[name, number(r["ms"]), f"{r['excess_error']:.1e}" if "excess_error" in r else "-"]
            for name, r in results.items()]
    return table(["14 matrices of ResNet-18, rank 1/4", "ms", "excess of the squared truncation error"], rows)


def memory_section(content):
    names = []
    for row in content["rows"]:
        names += [n for n in row["growth_mib"] if n not in names]
    rows = [[n, *(number(r["growth_mib"].get(n), 0) for r in content["rows"])] for n in names]
    rows += [["our tape and scratch", *(number(r["working_mib"], 0) for r in content["rows"])],
             ["our allocations a step", *(str(r["steady_allocations"]) for r in content["rows"])]]
    return [f"Most resident memory from before the network is made through ten steps, batch {content['batch']}, above "
            "what was there before, MiB (our hybrid is made from a dense network, PyTorch's is made as it is); and how "
            "often our step asks for memory once it is warm:", "",
            *table(["", *(r["work"] for r in content["rows"])], rows)]


def kernels_section(content):
    lines = []
    rows = content["rows"]
    groups = {}
    for r in rows:
        if r["factorized_layers"] > 0:
            groups.setdefault((r["mode"], r["direction"]), []).append(r["percent_of_bound"])
    lines += ["Percent of the bound over the layers that the paper factorizes:", ""]
    lines += table(["mode", "direction", "geometric mean", "worst", "shapes"],
                   [[m, d, number(geometric_mean(v)), number(min(v)), str(len(v))] for (m, d), v in groups.items()])
    by_layer = {}
    for r in rows:
        key = (r["network"], r["layer"], r["mode"], r["shape"])
        by_layer.setdefault(key, {})[r["direction"]] = r
    directions = ["forward", "grad_input", "grad_weight", "backward"]
    lines += ["<details><summary>Every layer: ms (percent of the bound)</summary>", ""]
    lines += table(["network", "layer", "mode", "shape", *directions],
                   [[*key, *(f"{found[d]['ms']:.2f} ({found[d]['percent_of_bound']:.0f} %)" if d in found else "-"
                             for d in directions)] for key, found in by_layer.items()])
    return [*lines, "</details>", ""]


def sweep_section(content, plots):
    lines = [f"![{title}](cpu/{name})" for title, name in plots]
    lines += ["", "Points: us and our peers in turns; lines: ours alone, all points.", ""]
    worst, at = rank_jump(content)
    if at:
        lines += [f"Largest jump of the time between neighbouring ranks beyond the rounding to {VECTOR} floats: "
                  f"{number(100 * (worst - 1))} % (rank {at} to {at + 1}).", ""]
    return lines + comparison_table("forward + backward", content["rows"])


def rank_jump(content):
    times = {}
    for p in content["points"]:
        if p["sweep"] == "rank":
            times[p["value"]] = times.get(p["value"], 0) + p["ms"]
    worst, at = 0.0, 0
    for r in sorted(times):
        if r + 1 in times:
            rounding = math.ceil((r + 1) / VECTOR) / math.ceil(r / VECTOR)
            jump = times[r + 1] / times[r] / rounding
            worst, at = max((worst, at), (jump, r))
    return worst, at


# ------------------------------------------------------------------ plots

def plot(path, title, axis, series, logarithmic):
    """series: name -> (style, [(x, y)]). True if a picture was drawn."""
    settings = (f"set encoding utf8\nset title '{title}' noenhanced\nset xlabel '{axis}'\nset ylabel 'ms'\n"
                "set key top left noenhanced")
    if logarithmic:
        settings += "\nset logscale xy 2\nset format y '%g'"
    return gnuplot.draw(path, "900,500", settings, [(points, f"with {style} lc {i + 1} title '{name}'")
                                                    for i, (name, (style, points)) in enumerate(series.items())])


def sweep_plots(content, raw):
    shapes = {"batch": "128 -> 32 -> 128 channels, 16x16", "width": "C -> C/4 -> C channels, 16x16, batch 32",
              "rank": "256 -> r -> 256 channels, 8x8, batch 64"}
    drawn = []
    for sweep, shape in shapes.items():
        series = {}
        for direction in ["forward", "backward"]:
            points = [(p["value"], p["ms"]) for p in content["points"] if p["sweep"] == sweep and p["direction"] == direction]
            series[f"ours, {direction}"] = ("lines lw 2", points)
        together = {}
        for p in content["points"]:
            if p["sweep"] == sweep:
                together[p["value"]] = together.get(p["value"], 0) + p["ms"]
        series["ours, both"] = ("lines lw 2", sorted(together.items()))
        for row in content["rows"]:
            if row.get("sweep") != sweep:
                continue
            for name, result in row["results"].items():
                label = "ours, both (in turns)" if name == "ours" else name
                series.setdefault(label, ("points pt 7 ps 0.6", []))[1].append((row["value"], result["ms"]))
        name = f"{sweep}-{content['threads']}.svg"
        title = f"{sweep}: {shape}, {content['threads']} thread" + ("s" if content["threads"] > 1 else "")
        if series["ours, both"][1] and plot(raw / name, title, sweep, series, sweep != "rank"):
            drawn.append((title, name))
    return drawn


# ------------------------------------------------------------------ goals

def best_ratio(row, *words):
    """The smallest ratio among the peers whose names hold all words."""
    found = [r for name, r in row.get("ratios", {}).items() if all(w in name for w in words)]
    return min(found) if found else None


class Goals:
    def __init__(self):
        self.rows = []

    def add(self, goal, measured, met, digits=2):
        shown = "not measured" if measured is None else number(measured, digits)
        self.rows.append([goal, shown, "-" if measured is None else "met" if met(measured) else "**missed**"])


def kernel_goals(goals, content):
    rows = [r for r in content["rows"] if r["factorized_layers"] > 0]
    for directions, mean_goal, worst_goal in [(["forward"], 85, 75), (["grad_input", "grad_weight"], 78, 65)]:
        values = [r["percent_of_bound"] for r in rows if r["mode"] == "lowrank" and r["direction"] in directions]
        if not values:
            continue
        what = f"{' and '.join(directions)}, low-rank, {content['threads']} thread(s)"
        goals.add(f"{what}: geometric mean at least {mean_goal} % of the bound", geometric_mean(values),
                  lambda v, g=mean_goal: v >= g, 1)
        goals.add(f"{what}: worst at least {worst_goal} %", min(values), lambda v, g=worst_goal: v >= g, 1)
    changes = [abs(r["to_dynamic"] - 1) * 100 for r in rows if "to_dynamic" in r]
    goals.add(f"static against dynamic rank, {content['threads']} thread(s): within 5 %, largest difference",
              max(changes, default=None), lambda v: v <= 5, 1)


def step_goals(goals, content):
    rows = {r["work"]: r for r in content["rows"]}
    for work, least, words in [("resnet18 dense", 1.15, ("PyTorch 1.13", "tuned")),
                               ("resnet18 hybrid", 1.25, ("PyTorch 1.13", "tuned")),
                               ("resnet18 hybrid", 2.0, ("PyTorch 1.13", "as installed", "channels last")),
                               ("vgg19 hybrid", 1.15, ("PyTorch 1.13", "tuned"))]:
        if work in rows:
            goals.add(f"{work} step, {content['threads']} threads: at least {least} times {', '.join(words)}",
                      best_ratio(rows[work], *words), lambda v, g=least: v >= g)
    if "resnet18 hybrid" in rows:
        goals.add("resnet18: hybrid step at most 0.466 of our dense one", rows["resnet18 hybrid"].get("hybrid_to_dense"),
                  lambda v: v <= 0.466, 3)


def sequence_goals(goals, content):
    rows = {r["work"]: r for r in content["rows"]}
    for work, least in [("lstm lowrank", 1.4), ("transformer hybrid", 1.25)]:
        ours = rows.get(work, {}).get("results", {}).get("ours")
        if not ours:
            continue
        share = 100 * ours["bound_ms"] / ours["ms"]
        goals.add(f"{work} step, {threads_text(content['threads'])}: at least {least} times PyTorch 1.13, tuned, or 70 % of the "
                  f"bound ({number(share)} %)", best_ratio(rows[work], "PyTorch 1.13", "tuned"),
                  lambda v, g=least, p=share: v >= g or p >= 70)


def svd_goals(goals, content, steps):
    ours = content["rows"][0]["results"]["ours"]
    hybrid = next((r["results"]["ours"]["ms"] for r in steps["rows"] if r["work"] == "resnet18 hybrid"), None)
    goals.add(f"the switch at most half of a hybrid step ({content['threads']} thread(s)), share",
              ours["ms"] / hybrid if hybrid else None, lambda v: v <= 0.5)
    goals.add("the switch: excess truncation error at most 1e-6, in millionths", ours["excess_error"] * 1e6,
              lambda v: v <= 1, 3)


def goal_lines(found):
    # The goals are for 128 images; other batches are for looking around.
    found = {section: {t: c for t, c in by_threads.items() if c.get("batch", 128) == 128}
             for section, by_threads in found.items()}
    goals = Goals()
    for content in found.get("kernels", {}).values():
        kernel_goals(goals, content)
    for content in found.get("conv", {}).values():
        _, ratios = conv_sums(content)
        peers = [r for name, r in ratios.items() if name.startswith("oneDNN") and name.endswith("direct")
                 or ("PyTorch 1.13" in name and "tuned" in name)]
        goals.add(f"factorized layers of ResNet-18, {content['threads']} thread(s): at least 1.2 times the better of "
                  "oneDNN direct and tuned PyTorch 1.13", min(peers, default=None), lambda v: v >= 1.2)
    steps = found.get("step", {})
    if steps:
        step_goals(goals, steps[max(steps)])
    for content in found.get("sequences", {}).values():
        if content["threads"] == 1:
            sequence_goals(goals, content)
    svds = found.get("svd", {})
    for threads, content in svds.items():
        if threads in steps:
            svd_goals(goals, content, steps[threads])
    for content in list(found.get("memory", {}).values())[-1:]:
        for row in content["rows"]:
            peers = [g for n, g in row["growth_mib"].items() if n.startswith("PyTorch 1.13")]
            goals.add(f"growth of memory, {row['work']}: at most 0.8 of the least of PyTorch 1.13's",
                      row["growth_mib"]["ours"] / min(peers) if peers else None, lambda v: v <= 0.8)
        goals.add("allocations in a warm step", float(max(r["steady_allocations"] for r in content["rows"])),
                  lambda v: v == 0, 0)
    return table(["goal", "measured", ""], goals.rows) if goals.rows else []


# ------------------------------------------------------------------ page

def threads_text(threads):
    return f"{threads} thread{'s' if threads > 1 else ''}"


def most_used_machine(found):
    """The processor that most sections were measured on."""
    return collections.Counter(c["machine"]["cpu"] for by_threads in found.values() for c in by_threads.values()).most_common(1)[0][0]


def head(found):
    contents = [c for by_threads in found.values() for c in by_threads.values() if c["machine"]["cpu"] == most_used_machine(found)]
    newest = max(contents, key=lambda c: c["date"])
    machine = newest["machine"]
    peaks = [f"{number(c['machine']['peak_gflops'])} GFLOP/s and {number(c['machine']['memory_gbs'])} GB/s with "
             f"{threads_text(c['threads'])}" for c in {c["threads"]: c for c in contents}.values()]
    versions = {v for c in contents for v in c.get("versions", {}).values()}
    shares = [r["others_share"] for c in contents for r in [c, *c["rows"]] if "others_share" in r]
    disturbed = max(shares, default=0.0)
    met = [c for c in contents if "missing" in c]
    missing = {f"{k} ({v})" for c in met for k, v in c["missing"].items() if all(k in other["missing"] for other in met)}
    lines = ["<!-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception -->",
             "<!-- Written by bench/compare; the numbers are those of cpu/*.json. -->", "# Speed on the CPU", "",
             f"Machine: {machine['cpu']}, {machine['cores']} cores; {machine['compiler']}; measured {newest['date']} at "
             f"{newest['commit']}. Fused multiply-add peak and memory bandwidth (half reads, half writes), measured in the "
             f"same runs: {'; '.join(peaks)}.", "",
             "Each candidate has a turn in each round, in a process that stays warm; a time is the median over rounds, a ratio "
             "(a peer's time over ours: above 1, we are faster) the median of the ratios within rounds, because the clock "
             "drifts. Bounds are the longer of real-pixel multiply-adds at the peak measured within the same second and "
             "bytes that must move at the measured bandwidth; they are those of direct sums, so Winograd, which our 3x3 "
             "convolutions of stride 1 use where it pays, can be above 100 %. `As installed` is PyTorch with nothing set; `tuned` keeps "
             "memory between steps (`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456`), "
             "lets ATen use AVX-512 (`ATEN_CPU_CAPABILITY=avx512`), and runs with the OpenMP build of OpenBLAS.", "",
             f"While something was measured, other programs used at most {number(100 * disturbed)} % of the "
             "processor.", "",
             f"PyTorch versions: {', '.join(sorted(versions)) or 'none'}."
             + (f" Missing: {'; '.join(sorted(missing))}." if missing else ""), "",
             "```sh", *sorted({c["command"] for c in contents}), "```", ""]
    return lines


def write_page(results):
    raw = results / "cpu"
    found = load(raw)
    if not found:
        print("nothing measured yet: no page")
        return
    lines = head(found)
    goals = goal_lines(found)
    if goals:
        lines += ["## Goals", "", *goals]
    titles = [("step", "Training steps", step_section), ("bf16", "Training steps in bfloat16", bf16_section),
              ("mobile", "Blocks of MobileNet", step_section),
              ("sequences", "Training steps over sequences", sequences_section),
              ("inference", "Inference", inference_section), ("conv", "Factorized layers of ResNet-18", conv_section),
              ("conv_bf16", "Factorized layers of ResNet-18 in bfloat16", conv_section),
              ("kernels", "Our kernels against the machine", kernels_section), ("gemm", "Matrix products", gemm_section),
              ("gemm_bf16", "Matrix products in bfloat16", gemm_bf16_section),
              ("svd", "The switch", svd_section), ("memory", "Memory", memory_section)]
    for section, title, write in titles:
        for threads, content in found.get(section, {}).items():
            lines += [f"## {title}, {threads_text(threads)}", ""]
            machine = content["machine"]
            if machine["cpu"] != most_used_machine(found):
                lines += [f"On another machine: {machine['cpu']}, {machine['cores']} cores, {number(machine['peak_gflops'])} GFLOP/s "
                          f"and {number(machine['memory_gbs'])} GB/s; {content['date']}, {content['commit']}.", ""]
            lines += write(content)
    for threads, content in found.get("sweep", {}).items():
        lines += [f"## Batch, width, rank, {threads_text(threads)}", "", *sweep_section(content, sweep_plots(content, raw))]
    page = results / "cpu.md"
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {page}")
