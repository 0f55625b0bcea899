#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""exchange_page.py [RESULTS]: writes docs/results/exchange.md from what bench/testbed has left in docs/results/exchange/.

Losses are printed as losses.
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALGORITHMS = ["library", "ring", "recursive doubling"]


def load(path):
    """One run of the test bed: its records by kind."""
    records = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records.setdefault(record["kind"], []).append(record)
    records["name"] = path.name
    return records


def header(run):
    return run["testbed"][0]


def where(run):
    head, link = header(run), run["link"][0]
    late = ""
    if any(r.get("skew_ms") for r in run.get("allreduce", [])):
        late = f", ranks begin within {max(r['skew_ms'] for r in run['allreduce']):.0f} ms of each other"
    return f"{head['hosts']} hosts, {link['rate_mbit']:.0f} Mbit/s{late}"


def all_reduce_table(run):
    lines = [f"### {where(run)}", "",
             "| bytes | " + " | ".join(f"{a}, ms (p90)" for a in ALGORITHMS) + " | selected | % of goodput, median | p90 |",
             "|---" * (len(ALGORITHMS) + 4) + "|"]
    rows = run["allreduce"]
    for size in dict.fromkeys(r["bytes"] for r in rows):
        of = {r["algorithm"]: r for r in rows if r["bytes"] == size}
        chosen = next(r for r in of.values() if r["selected"])
        cells = [f"{of[a]['ms']:.3f} ({of[a]['ms_p90']:.3f})" if a in of else "-" for a in ALGORITHMS]
        lines.append(f"| {size:,} | " + " | ".join(cells) +
                     f" | {chosen['algorithm']} | {chosen['link_percent']:.1f} | {chosen['link_percent_p90']:.1f} |")
    return [*lines, "", f"`{header(run)['command']}`", ""]


def step_name(row):
    bucket = row.get("bucket_mb")
    return row["compressor"] + ("" if bucket in (None, 25) else ", one bucket" if bucket == 1024 else f", buckets of {bucket} MB")


def step_table(run):
    lines = [f"### {where(run)}", "",
             "| system | network | compressor | payload, bytes | ms a step | p90 | compute | encode | exposed | decode | update | runs |",
             "|---" * 12 + "|"]
    for row in sorted(run["step"], key=lambda r: (r["mode"], r["ms_per_step"])):
        parts = [f"{row[p + '_ms']:.1f}" if row[p + "_ms"] is not None else "-"
                 for p in ("compute", "encode", "exposed", "decode", "update")]
        lines.append(f"| {row['system']} | {row['mode']} | {step_name(row)} | {row['payload_bytes']:,} | {row['ms_per_step']:.1f} | "
                     f"{row['ms_p90']:.1f} | " + " | ".join(parts) + f" | {row['runs']} |")
    return [*lines, "", f"`{header(run)['command']}`", ""]


def goal(text, value, bound, at_least=True):
    met = value >= bound if at_least else value <= bound
    return f"| {text} | {value:.2f} | {'met' if met else '**missed**'} |"


def best(rows, system, mode, hooks=("none",)):
    """The fastest of what a system offers; ours and theirs get the same choice."""
    return min((r["ms_per_step"] for r in rows if r["system"] == system and r["mode"] == mode and r["compressor"] in hooks),
               default=None)


def goals(runs):
    lines = ["| goal | measured | |", "|---|---|---|"]
    for run in runs:
        hosts, rate = header(run)["hosts"], run["link"][0]["rate_mbit"]
        chosen = [r for r in run.get("allreduce", []) if r["selected"] and r["link_percent"] is not None]
        if any(r["skew_ms"] for r in chosen) or rate != 1000:
            chosen = []
        large = [r for r in chosen if r["bytes"] >= 4_000_000]
        bound = 90 if hosts == 2 else 75
        for name, field in [("median", "link_percent"), ("90th percentile", "link_percent_p90")]:
            if large and (hosts == 2 or name == "median"):
                lines.append(goal(f"selected all-reduce, {hosts} hosts, 1 Gbit/s, from 4 MB, {name}, the least size: at least "
                                  f"{bound} % of goodput", min(r[field] for r in large), bound))
            near = [r for r in chosen if 900_000 <= r["bytes"] <= 1_100_000]
            if near and hosts == 2:
                lines.append(goal(f"selected all-reduce, 2 hosts, 1 Gbit/s, 1 MB, {name}: at least 80 % of goodput",
                                  min(r[field] for r in near), 80))
        rows = run.get("step", [])
        ours = best(rows, "ours", "hybrid")
        theirs = {mode: best(rows, "ddp", mode) for mode in ("dense", "hybrid")}
        if hosts != 2 or not ours or None in theirs.values():
            continue
        if rate == 100:
            lines.append(goal("100 Mbit/s: our hybrid step, times faster than DDP dense: at least 3.0", theirs["dense"] / ours, 3))
            lines.append(goal("100 Mbit/s: our hybrid step, times faster than DDP hybrid: at least 1.0", theirs["hybrid"] / ours, 1))
        if rate == 1000:
            lines.append(goal("1 Gbit/s: our hybrid step, times faster than DDP hybrid: at least 1.3", theirs["hybrid"] / ours, 1.3))
    return lines if len(lines) > 2 else []


def fastest(run):
    """Which compressor wins on time per step, ours."""
    lines = []
    for mode in ("dense", "hybrid"):
        rows = sorted((r for r in run["step"] if r["system"] == "ours" and r["mode"] == mode), key=lambda r: r["ms_per_step"])
        plain = next((r for r in rows if r["compressor"] == "none"), None)
        if not plain or not rows:
            continue
        quicker = [f"{r['compressor']} ({r['ms_per_step']:.0f} ms)" for r in rows if r["ms_per_step"] < plain["ms_per_step"]]
        if quicker:
            lines.append(f"- {where(run)}, {mode}: faster a step than uncompressed gradients ({plain['ms_per_step']:.0f} ms): "
                         + ", ".join(quicker) + ".")
        else:
            lines.append(f"- {where(run)}, {mode}: no compressor is faster a step than uncompressed gradients "
                         f"({plain['ms_per_step']:.0f} ms).")
    return lines


INTRODUCTION = """<!-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception -->
<!-- Written by bench/exchange_page.py; the numbers are those of exchange/*.json. -->
# The gradient exchange on shaped links

`bench/testbed` builds hosts out of network namespaces, joins them with virtual Ethernet that `tc` holds at a rate, and
runs `bench_exchange` between them over TCP through real Open MPI, one rank a host, one thread a rank, every rank on a core
of its own where there are enough. It needs root and iproute2. All numbers of a table are of one run.

- **Goodput** is what a plain TCP connection carries over the same link in the same run; an all-reduce of n bytes among p
  ranks is to move 2 (p - 1) / p n bytes out of every rank, and the percentage is that volume over time over goodput. The
  shaper lets a burst pass after a pause, so short messages may show more than 100 %.
- **A time** is the slowest rank's; tables have medians, and the 90th percentile beside it. All ranks begin together unless
  a table says otherwise. Candidates take turns within a run.
- **Selected** is the algorithm that the exchange takes for this length, by the plan that `tune` made on this link.
- **A step** is ResNet-18 on 32 images of CIFAR-10's size a rank: forward, loss, backward, exchange, SGD. *Compute* is
  forward and backward of the same ranks on the same cores at the same time without exchange, in turns with the others;
  *encode*, *decode* and *update* are measured; *exposed* is the rest of the step: waiting, and computing more slowly while
  messages are on their way. Ours updates a bucket while later ones are on their way.
- **DDP** is PyTorch's DistributedDataParallel over gloo, tuned as in [cpu.md](cpu.md) (channels last, AVX-512, memory kept),
  with gradients as bucket views and without broadcasts of batch-norm statistics. Its PowerSGD hook gets one bucket: with
  several, its sums start in another order on every rank, and gloo ends the connection. What its hooks spend on encoding is
  part of its exposed time.
"""


def machine_line(run):
    head, link = header(run), run["link"][0]
    m = head["machine"]
    return (f"- `{run['name']}`: commit {head['commit']}, {head['date']}; {m['cpu']}, {m['cores']} cores, kernel "
            f"{head['kernel'].split('-')[0]}, {m['compiler']}, -O3 -march=native, {(head['mpi'] or ['?'])[0]}; goodput "
            f"{link['raw_goodput_mbit']:.1f} Mbit/s ({link['both_ways_mbit']:.1f} each way with both at once), round trip "
            f"{link['round_trip_ms']:.3f} ms; tbf burst {link['burst']}, limit {link['limit']}; TCP {link['congestion_control']}; "
            f"offloads: {link['offloads']}")


def write_page(results):
    runs = [load(p) for p in sorted((results / "exchange").glob("*.json")) if '"kind": "testbed"' in p.read_text(encoding="utf-8")]
    lines = [INTRODUCTION.rstrip(), "", *goals(runs), ""]
    notes = results / "exchange" / "notes.md"
    if notes.is_file():
        lines += [notes.read_text(encoding="utf-8").strip(), ""]
    if reduced := [r for r in runs if "allreduce" in r]:
        lines += ["## All-reduces", ""]
        for run in reduced:
            lines += all_reduce_table(run)
    if stepped := [r for r in runs if "step" in r]:
        lines += ["## Training steps", ""]
        for run in stepped:
            lines += step_table(run)
        lines += ["Time per step says nothing about accuracy: what PowerSGD and Signum apply is not the mean of the gradients.", ""]
        for run in stepped:
            lines += fastest(run)
        lines.append("")
    lines += ["## Runs", "", *map(machine_line, runs), ""]
    (results / "exchange.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_page(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "results")
