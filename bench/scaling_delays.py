# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The sections of docs/results/scaling.md about links with delay and about rare exchanges."""
import copy
import math

import records
import scaling_systems as systems
from compressor_rows import MODES
from scaling_model import WINDOW
from scaling_rare import Outer
from scaling_report import Predictor, milliseconds

RANKS = [2, 8, 64, 512]
RATES = [0.1, 1]  # Gbit/s
FAR = 0.1  # seconds, one way
DELAYS = [0.0, 0.001, 0.01, 0.05, FAR, 0.2]
# Of a prediction: what depends on the ranks.
OVER_RANKS = ("payload_bytes", "sent_bytes", "step_ms", "compute_ms", "encode_ms", "exposed_ms", "decode_ms", "update_ms")
SWEPT = (*systems.SHORT, "rare", "rare-blocktopk")
OUTERS = [Outer(16), Outer(50), Outer(500), Outer(16, 4, 2), Outer(50, 4, 2), Outer(50, 4, 10), Outer(500, 4, 10)]


def with_options(a, **changes):
    changed = copy.copy(a)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def keep(rows, path):
    """Writes predictions, one line for each series over the ranks."""
    path.write_text(records.lines(series(rows)), encoding="utf-8")


def series(rows):
    """Predictions joined over the ranks. Buckets and the ratio to the dense network follow from the rest."""
    return records.of_series((records.without(r, ("buckets", "speedup_over_dense")) for r in rows), "ranks", OVER_RANKS)


def table(heads, rows):
    return [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *(f"| {' | '.join(r)} |" for r in rows), ""]


def delay_text(delay):
    return f"{1e3 * delay:g} ms" if delay else "no delay"


def step_on_test_bed(measured, predictor, s, ranks, rate, delay):
    """Milliseconds of the last such run, and of them those that the exchange exposes; "-" if there is none."""
    found = [f'{r["ms_per_step"]:,.0f} ({r["exposed_ms"]:,.0f})' for g in measured.groups if g.link is not None
             and math.isclose(g.nominal, 1e3 * rate) and math.isclose(g.delay, delay, abs_tol=1e-9) for r in g.steps
             if (r["row"], r["mode"], r["ranks"], r["batch"]) == (s.name, s.mode, ranks, predictor.case.batch)]
    return found[-1] if found else "-"


def everything(measured, a, rate, kept):
    """A table of all systems over links of one rate, with and without delay."""
    heads, columns = ["system"], []
    for delay in (0.0, FAR):
        predictor = Predictor(measured, with_options(a, delay=delay))
        rows = [r for ranks in RANKS for r in predictor.rows([ranks], [rate])]
        kept += rows if delay else []
        on_test_bed = [step_on_test_bed(measured, predictor, s, RANKS[0], rate, delay) for s in predictor.systems]
        heads += [f"{delay_text(delay)}: {RANKS[0]} ranks, measured", *(f"{ranks}" for ranks in RANKS)]
        columns.append(on_test_bed)
        columns += [[milliseconds(r) for r in rows if r["ranks"] == ranks] for ranks in RANKS]
    return table(heads, zip([s.title for s in predictor.systems], *columns))


def sweep(measured, a, ranks, rate, kept):
    columns = []
    for delay in DELAYS:
        predictor = Predictor(measured, with_options(a, systems=SWEPT, delay=delay))
        rows = list(predictor.rows([ranks], [rate]))
        kept += rows
        columns.append(map(milliseconds, rows))
    return table(["system", *map(delay_text, DELAYS)], zip([s.title for s in predictor.systems], *columns))


def delays(measured, a, folder):
    kept, ranks, rate = [], 64, 1
    lines = ["## Links with delay", "",
             f"Milliseconds a step. `--delay {1e3 * FAR:g}ms` delays every message by this time, one way, as `bench/testbed "
             "--delay` does. Columns with the word measured have steps on the test bed, in brackets the part that the exchange "
             "exposes, \"-\" where no such run is in the files above. Where another machine has measured, its computing takes "
             "another time than the predictions'; the exposed parts remain comparable. All other columns are predictions: "
             "computing and the update are measured, encoding and decoding too where no >= stands; bytes, messages and waiting "
             "are the model's.", ""]
    for of in RATES:
        lines += [f"### {of:g} Gbit/s", "", *everything(measured, a, of, kept)]
    lines += [f"These commands measure steps at {1e3 * FAR:g} ms, and all encoding and decoding. `bench/testbed` delays by "
              "netem, or by a process of its own on a kernel without netem. They use the default plan of the exchange, so "
              "that buckets and algorithms are the same at both rates:", "", "```sh"]
    for of in RATES:
        rate_text = f"{1e3 * of:g}mbit" if of < 1 else f"{of:g}gbit"
        lines += [f"bench/testbed --hosts 2 --rate {rate_text} --delay {1e3 * FAR:g}ms --no-ddp --only link step --runs 5 \\",
                  "  --compressors none bf16 fp16 powersgd-4 signum signum-two-hop topk-0.01 randomk efsign doublesqueeze \\",
                  f"  --json docs/results/scaling/step-2-hosts-{rate_text}-{1e3 * FAR:g}ms.json --seconds 3600 "
                  "--exchange --default-plan"]
    lines += ["bench/compressors --only-codecs", "```", "",
              f"### More and more delay: {ranks} ranks, {rate:g} Gbit/s", "", *sweep(measured, a, ranks, rate, kept),
              f"At most {WINDOW >> 20} MiB of a message are under way, {8e-6 * WINDOW / FAR:,.0f} Mbit/s at {1e3 * FAR:g} ms. "
              "`--window-kib` predicts other limits.", ""]
    keep(kept, folder / "delay.json")
    return lines


# ------------------------------------------------------------------ rare exchanges

def rare_table(measured, a, kept):
    few = RANKS[1:]
    rows = []
    for mode in MODES:
        for outer in OUTERS:
            changes = {"local_steps": outer.local_steps, "outer_fragments": outer.fragments, "outer_delay": outer.delay}
            predictor = Predictor(measured, with_options(a, systems=["rare"], delay=FAR, **changes))
            of = [predictor.row(systems.System("rare", mode), ranks, rate) for rate in RATES for ranks in few]
            kept += of
            rows.append([f"{systems.BASES[mode]}, {outer}", *(f"{r['exposed_ms']:,.1f} ({r['step_ms']:,.0f})" for r in of)])
    return table(["network, outer loop", *(f"{rate:g} Gbit/s, {ranks} ranks" for rate in RATES for ranks in few)], rows)


def least_steps(predictor, mode, ranks, rate):
    """(H, system, seconds): the fastest system of the network that exchanges in each step and has been timed, its step, and the
    smallest H with which rare exchanges, in one fragment and without delay steps, are faster; None: no H."""
    rivals = [s for s in predictor.systems if s.mode == mode and not s.row.rare and s not in predictor.untimed
              and s.row.family != "pactrain"]
    times = {s: predictor.step(s, ranks, rate)[0].total for s in rivals}
    best = min(times, key=times.get)
    once = predictor.step(systems.System("rare", mode), ranks, rate)[0]  # with H = 1
    spare = times[best] - once.compute - once.update
    return (math.floor(once.exposed / spare) + 1 if spare > 0 else None), best, times[best]


def least_table(measured, a, rate):
    few = RANKS[1:]
    rows = []
    for mode in MODES:
        for delay in DELAYS:
            predictor = Predictor(measured, with_options(a, delay=delay, local_steps=1, outer_fragments=1, outer_delay=0))
            found = [least_steps(predictor, mode, ranks, rate) for ranks in few]
            rows.append([f"{systems.BASES[mode]}, {delay_text(delay)}",
                         *(f"{'none' if steps is None else steps} ({best.row.title}: {1e3 * time:,.0f} ms)"
                           for steps, best, time in found)])
    return table(["network, delay", *(f"{ranks} ranks" for ranks in few)], rows)


def rare_exchanges(measured, a, folder):
    kept, rate = [], 1
    lines = ["## Rare exchanges", "",
             "Predicted: every rank takes H local steps, then the ranks exchange the change of their parameters, uncompressed, in F "
             "fragments, each while D more local steps are taken (`--local-steps`, `--outer-fragments`, `--outer-delay`). Links of "
             f"{1e3 * FAR:g} ms each way; exposed milliseconds a step, in brackets the step.", "", *rare_table(measured, a, kept),
             "The smallest H (F = 1, D = 0) with which rare exchanges are faster than every system that exchanges in each step, at "
             f"{rate:g} Gbit/s; in brackets the fastest of those. PacTrain, whose network is another one, and compressors that have "
             "not been timed are not among them.", "", *least_table(measured, a, rate)]
    keep(kept, folder / "rare.json")
    return lines
