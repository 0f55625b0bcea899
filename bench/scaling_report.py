# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What bench/scaling says: predictions in tables, plots and sentences, and how far they are from what was measured."""
import math
import shutil
import statistics
import subprocess

import scaling_model as model
import scaling_rare as rare
import scaling_systems as systems
from scaling_records import FAST, TYPICAL_LATENCY, BadInput, compare_group, fit_host, fit_link, share_of

LATENCY = 1e6 * TYPICAL_LATENCY  # microseconds, where none was measured
WITHIN, WORST = 15, 30  # percent: 90 % of what is validated, all of it
SHOWN = {"ring": "ring or recursive doubling", "ps": "parameter servers", "hierarchical": "hierarchical"}


# ------------------------------------------------------------------ predictions

class Predictor:
    """Everything but the rank count, the rate and the system, fixed. A system of which encoding and decoding were not measured
    is in `untimed`: what is predicted of it is the least that a step takes."""

    def __init__(self, measured, a):
        self.a = a
        cases = [c for c in measured.cases() if a.batch in (None, c.batch)]
        if not cases:
            batch = "" if a.batch is None else f" at batch {a.batch}"
            raise BadInput(f"{', '.join(measured.paths)}: no buckets of both a dense and a hybrid network, measured with the "
                           f"same ranks and batch{batch}")
        self.case = cases[0]
        fits = [fit_link(g) for g in measured.groups if g.link and g.all_reduces]
        fits = [f for f in fits if f.rows]
        self.latency = a.latency_us if a.latency_us is not None else (
            1e6 * statistics.median(f.link.latency for f in fits) if fits else LATENCY)
        self.host = a.host_ns if a.host_ns is not None else 1e9 * (fit_host(measured.groups) or 0.0)
        self.share = a.share if a.share is not None else share_of(measured.groups) or 0.0
        self.networks = {mode: measured.network(self.case, mode).scaled(a.compute_scale) for mode in ("dense", "hybrid")}
        self.outer = rare.Outer(a.local_steps, a.outer_fragments, a.outer_delay) if a.local_steps else None
        self.codecs, self.missing, self.untimed = {}, [], set()
        for s in systems.systems(a.systems):
            try:
                systems.check(self.networks[s.mode], s, a.topology)
            except ValueError as e:
                self.missing.append(str(e))
                continue
            codec = measured.codec(self.case, s.mode, s.name)
            if codec is None:
                self.untimed.add(s)
            self.codecs[s] = (codec or model.Codec()).scaled(a.compute_scale)
        self.systems = list(self.codecs)

    def outer_of(self, s):
        return (self.outer or rare.Outer(s.row.local_steps)) if s.row.rare else None

    def cluster(self, ranks, rate):
        a = self.a
        link = model.Link(rate * 1e9 / 8, self.latency / 1e6, self.host / 1e9, self.share, delay=a.delay,
                          window=1024 * a.window_kib)
        inner = model.Link(a.inner_rate * 1e9 / 8, a.inner_latency_us / 1e6, self.host / 1e9)
        return model.Cluster(ranks, link, a.topology, a.ranks_per_host, inner, a.servers, a.algorithm,
                             a.update == "early")

    def title(self, s):
        """With the options of the outer loop, where the row's own are replaced."""
        return s.title.replace(f"H = {s.row.local_steps}", str(self.outer)) if s.row.rare and self.outer else s.title

    def step(self, s, ranks, rate):
        limits = systems.PLANS if self.a.plan == "best" else (0,)
        codec = self.codecs.get(s, model.Codec())
        return systems.best_plan(self.networks[s.mode], s, codec, self.cluster(ranks, rate), limits, self.outer_of(s),
                                 self.a.by_bucket)

    def row(self, s, ranks, rate):
        step, a, outer = self.step(s, ranks, rate)[0], self.a, self.outer_of(s)
        row = {"kind": "prediction", "system": self.title(s), "row": s.name, "mode": s.mode, "topology": a.topology,
               "ranks": ranks, "rate_gbit": rate, "latency_us": round(self.latency, 3), "delay_ms": 1e3 * a.delay,
               "batch": self.case.batch, "compute_scale": a.compute_scale,
               "payload_bytes": round(systems.payload_bytes(s.name, s.mode, ranks) / (outer.local_steps if outer else 1)),
               "sent_bytes": round(step.sent), "buckets": len(step.timeline),
               "codec": "not measured" if s in self.untimed else "measured" if s.row.codec else "none",
               "step_ms": step.total * 1e3}
        if outer:
            row.update(local_steps=outer.local_steps, fragments=outer.fragments, delay_steps=outer.delay)
        for name in ["compute", "encode", "exposed", "decode", "update"]:
            row[f"{name}_ms"] = round(getattr(step, name) * 1e3, 4)
        return row

    def rows(self, all_ranks, rates):
        for rate in rates:
            for ranks in all_ranks:
                dense = 1e3 * self.step(systems.DENSE, ranks, rate)[0].total
                for s in self.systems:
                    r = self.row(s, ranks, rate)
                    r["speedup_over_dense"] = round(dense / r["step_ms"], 4)
                    r["step_ms"] = round(r["step_ms"], 4)
                    yield r

    def premises(self):
        a = self.a
        lines = [f"From {self.case.ranks} measured rank{'s' if self.case.ranks > 1 else ''} at batch {self.case.batch} each: "
                 + "; ".join(f"{mode} forward and backward {1e3 * n.compute:.1f} ms, update {1e3 * n.update:.1f} ms, "
                             f"{len(n.buckets)} buckets" for mode, n in self.networks.items())
                 + ("." if a.compute_scale == 1 else f" (all computing times {a.compute_scale:g} of the measured ones).")]
        delay = f" and {1e3 * a.delay:g} ms of delay each way" if a.delay else ""
        if a.delay and a.window_kib:
            delay += f", {a.window_kib:g} KiB of one under way at most"
        text = (f"Link: {self.latency:.1f} us a message{delay}; a host moves a byte in {self.host:.2f} ns, during which nothing is "
                f"computed, and waits with {100 * self.share:.0f} % of the computing's core; {SHOWN[a.topology]}")
        if a.topology == "hierarchical":
            text += f", {a.ranks_per_host} ranks a host, {a.inner_rate:g} Gbit/s and {a.inner_latency_us:g} us within"
        if a.topology == "ps":
            text += f", {a.servers or 'as many'} servers{'' if a.servers else ' as ranks'}"
        lines.append(text + ".")
        lines += [f"Left out: {m}." for m in self.missing]
        if self.untimed:
            titles = dict.fromkeys(s.row.title for s in self.systems if s in self.untimed)
            lines.append(f"Not measured: encoding and decoding of {'; '.join(titles)}. Their steps take at least (>=) what is "
                         "printed. `bench/compressors --only-codecs` measures them.")
        return lines


def tables(rows):
    """A table for each rate: milliseconds a step, and how many times faster than dense. The least is bold."""
    lines = []
    all_ranks = list(dict.fromkeys(r["ranks"] for r in rows))
    for rate in dict.fromkeys(r["rate_gbit"] for r in rows):
        lines += [f"{rate:g} Gbit/s", "", "| system | " + " | ".join(f"{ranks} ranks" for ranks in all_ranks) + " |",
                  "|---|" + "---:|" * len(all_ranks)]
        of_rate = {(r["system"], r["ranks"]): r for r in rows if r["rate_gbit"] == rate}
        least = {ranks: min((r["step_ms"] for r in of_rate.values() if r["ranks"] == ranks and is_complete(r)), default=None)
                 for ranks in all_ranks}
        for system in dict.fromkeys(r["system"] for r in rows):
            lines.append(f"| {system} | " + " | ".join(cell(of_rate[system, ranks], least[ranks]) for ranks in all_ranks) + " |")
        lines.append("")
    return lines


def is_complete(r):
    return r["codec"] != "not measured"


def milliseconds(r, least=None):
    """Of a prediction; the least of all is bold."""
    text = f"{r['step_ms']:,.0f}"
    return f">= {text}" if not is_complete(r) else f"**{text}**" if r["step_ms"] == least else text


def cell(r, least):
    text = milliseconds(r, least)
    return text if r["system"] == systems.DENSE.title else f"{text} ({r['speedup_over_dense']:.2f})"


def breakdown(rows):
    lines = ["| system | payload bytes | sent by a rank, MB | buckets | compute | encode | exposed | decode | update | "
             "ms a step | over dense |", "|---|" + "---:|" * 10]
    for r in rows:
        parts = [f"{r[f'{n}_ms']:.1f}" if is_complete(r) or n in ("compute", "exposed", "update") else
                 f">= {r['step_ms']:.1f}" if n == "step" else "not measured"
                 for n in ["compute", "encode", "exposed", "decode", "update", "step"]]
        lines.append(f"| {r['system']} | {r['payload_bytes']:,} | {r['sent_bytes'] / 1e6:,.1f} | {r['buckets'] or '-'} | "
                     + " | ".join(parts) + f" | {r['speedup_over_dense']:.2f} |")
    return [*lines, ""]


# ------------------------------------------------------------------ the question

LOWEST, HIGHEST = 1e-3, 1e3  # Gbit/s


def crossings(difference):
    """Rates at which the difference changes its sign, on a grid of 20 a decade, then by bisection."""
    grid = [LOWEST * 10 ** (i / 20) for i in range(round(20 * math.log10(HIGHEST / LOWEST)) + 1)]
    values = [difference(rate) for rate in grid]
    found = []
    for (low, a), (high, b) in zip(zip(grid, values), list(zip(grid, values))[1:]):
        if (a > 0) == (b > 0):
            continue
        for _ in range(30):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if (difference(middle) > 0) == (a > 0) else (low, middle)
        found.append(high)
    return values[0], found


def rate_text(rate):
    return f"{1e3 * rate:.3g} Mbit/s" if rate < 1 else f"{rate:.3g} Gbit/s"


def break_even(predictor, one, other, ranks):
    """At which rates `one` is faster than `other`, in words."""
    def difference(rate):
        return predictor.step(one, ranks, rate)[0].total - predictor.step(other, ranks, rate)[0].total
    first, found = crossings(difference)
    faster = first < 0
    if not found:
        return "at every rate" if faster else "at no rate"
    parts, low = [], None
    for rate in [*found, None]:
        if faster:
            parts.append(f"above {rate_text(low)}" if rate is None else f"below {rate_text(rate)}" if low is None else
                         f"from {rate_text(low)} to {rate_text(rate)}")
        faster, low = not faster, rate
    return " and ".join(parts)


def hidden_from(predictor, s, ranks):
    """The rate from which on less than a twentieth of the step is exposed communication; None: none does."""
    def difference(rate):
        step = predictor.step(s, ranks, rate)[0]
        return step.exposed - 0.05 * step.total
    first, found = crossings(difference)
    return LOWEST if first < 0 and not found else found[-1] if found and difference(HIGHEST) < 0 else None


def answer(predictor, ranks, rate):
    of = {s: predictor.step(s, ranks, rate)[0] for s in [systems.DENSE, systems.PUFFERFISH, *predictor.systems]}
    dense, ours = of[systems.DENSE], of[systems.PUFFERFISH]
    gain, alone = dense.total / ours.total, (dense.compute + dense.update) / (ours.compute + ours.update)
    verdict = "worth it" if gain > 1.05 else "hardly worth it" if gain > 1 else "not worth it"
    lines = [f"At {rate_text(rate)} and {ranks} ranks a step takes {1e3 * dense.total:,.0f} ms dense and "
             f"{1e3 * ours.total:,.0f} ms factorized: factorizing is {verdict}, {gain:.2f} times as fast (computing alone: {alone:.2f})."]
    for s, shown in [(systems.DENSE, "Dense"), (systems.PUFFERFISH, "Factorized")]:
        first = hidden_from(predictor, s, ranks)
        lines.append(f"{shown}: {1e3 * of[s].exposed:,.0f} ms of communication are exposed here; less than 5 % of the "
                     "step " + ("at no rate that was tried." if first is None else f"from {rate_text(first)} on."))
    for s in of:
        if s != systems.PUFFERFISH:
            least = "at least " if s in predictor.untimed else ""
            lines.append(f"Break-even with {s.title} ({least}{1e3 * of[s].total:,.0f} ms here): Pufferfish is the faster "
                         f"{break_even(predictor, systems.PUFFERFISH, s, ranks)}.")
    best = min((s for s in of if s not in predictor.untimed), key=lambda s: of[s].total)
    return [*lines, f"The fastest of all here: {best.title}, {1e3 * of[best].total:,.0f} ms. Times of a step say nothing of "
            "accuracy."]


# ------------------------------------------------------------------ validation

def validate(measured):
    """Lines of text; [(compared, fit)]; whether the goal is met."""
    lines, everything = [], []
    for group in measured.groups:
        if group.link is None:
            if group.all_reduces or group.steps:
                lines.append(f"{len(group.all_reduces) + len(group.steps)} rows before any link: not compared")
            continue
        # Of a link's own steps nothing is used for it.
        share = share_of([g for g in measured.groups if g is not group])
        fit = fit_link(group, fit_host(measured.groups) or 0.0, share_of([group]) or 0.0 if share is None else share)
        compared, left_out = compare_group(measured, group, fit)
        l = fit.link
        used = [f"{r['algorithm']} of {r['bytes']:,} B, {r['ms']:g} ms" for r in fit.rows]
        lines += ["", f"{group.title}: {8e-6 * l.rate:.1f} Mbit/s, {1e6 * l.latency:.1f} us a message, {1e9 * l.host:.2f} ns "
                  f"for a byte, waiting {100 * l.share:.0f} % of the computing's core, burst {l.burst / 1024:.0f} KiB; fitted "
                  f"to {'; '.join(used) or 'no row'}", "",
                  "| row | predicted, ms | measured, ms | error, % | exposed: measured, ms | bound, ms |",
                  "|---|---:|---:|---:|---:|---:|"]
        for c in compared:
            bound = " | |" if c.bound is None else f" {c.exposed:.1f} | {c.bound:.1f} |"
            lines.append(f"| {c.what} | {c.predicted:.3f} | {c.measured:.3f} | {c.error:+.1f} |{bound}")
        lines += ["", f"left out: {', '.join(left_out)}"] if left_out else []
        everything += compared
    if not everything:
        return [*lines, "nothing to compare: a link's record and rows after it are wanted"], [], False
    lines.append("")
    ok = False
    usual = [c for c in everything if not c.beyond]
    for name, of in [("all-reduces", [c for c in usual if c.bound is None]),
                     ("steps", [c for c in usual if c.bound is not None]), ("all", usual)]:
        if of:
            text, ok = summary(of)
            lines += [f"{name}: {text}", ""]
    if beyond := [c for c in everything if c.beyond]:
        lines += [f"not among these, over links of {FAST / 1e3:g} Gbit/s and more, where the hosts are the limit: "
                  f"{summary(beyond)[0]}", ""]
    return lines, everything, ok


def summary(compared):
    errors = [abs(c.error) for c in compared]
    close = sum(e <= WITHIN for e in errors)
    worst = max(compared, key=lambda c: abs(c.error))
    met = close >= 0.9 * len(errors) and abs(worst.error) <= WORST
    return (f"{close} of {len(errors)} within {WITHIN} % ({100 * close / len(errors):.0f} %), median error "
            f"{statistics.median(errors):.1f} %, worst {worst.error:+.1f} % ({worst.where}, {worst.what}); goal 90 % within "
            f"{WITHIN} %, all within {WORST} %: {'met' if met else 'missed'}"), met


# ------------------------------------------------------------------ plot

def plot(rows, path):
    """Time of a step over the ranks, a panel for each rate."""
    if shutil.which("gnuplot") is None:
        raise BadInput("no gnuplot: no plot")
    rates, names = (list(dict.fromkeys(r[k] for r in rows)) for k in ("rate_gbit", "system"))
    columns = 2 if len(rates) > 1 else 1
    count = math.ceil(len(rates) / columns)
    height = 300 * count + 90  # of the panels, and of the legend below them
    text = (f"set terminal svg size {450 * columns},{height} dynamic background rgb 'white'\nset output {quoted(path.name)}\n"
            "set multiplot\nset grid\nset logscale x 2\nset logscale y\n"
            "set xlabel 'ranks' offset 0,0.5\nset ylabel 'ms a step'\nset format y '%g'\nset key off\n")
    styles = [f"with linespoints lw 2 pt 7 ps 0.4 lc {i + 1}" for i in range(len(names))]
    for p, rate in enumerate(rates):
        plots = []
        for i, system in enumerate(names):
            points = "".join(f"{r['ranks']} {r['step_ms']}\n" for r in rows if (r["rate_gbit"], r["system"]) == (rate, system))
            text += f"$d{p}_{i} << EOD\n{points}EOD\n"
            plots.append(f"$d{p}_{i} using 1:2 {styles[i]}")
        text += (f"set size {1 / columns},{300 / height}\n"
                 f"set origin {p % columns / columns},{1 - 300 * (p // columns + 1) / height}\n"
                 f"set title '{rate:g} Gbit/s' offset 0,-0.5\nplot {', '.join(plots)}\n")
    legend = ", ".join(f"NaN {style} title '{system}'" for style, system in zip(styles, names))
    text += (f"unset logscale\nunset border\nunset tics\nunset xlabel\nunset ylabel\nunset title\nset size 1,{90 / height}\n"
             f"set origin 0,0\nset key center center horizontal maxrows {2 * (3 - columns)}\nplot [0:1][0:1] {legend}\n")
    done = subprocess.run(["gnuplot"], input=text + "unset multiplot\n", text=True, cwd=path.parent, check=False,
                          stderr=subprocess.PIPE)
    if done.returncode != 0 or not path.is_file():
        raise BadInput(f"{path}: gnuplot: {(done.stderr.strip().splitlines() or ['wrote nothing'])[-1]}")


def quoted(name):
    return "'" + name.replace("'", "''") + "'"
