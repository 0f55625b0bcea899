# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What bench/switch_study was to show, whether it does, and what a reader should choose.

A goal is (text, result as text, whether it is met; None if not known).
"""
import statistics

import curve_runs
import switch_jobs as jobs_of
from switch_results import UNPAIRED, at, drop, slowdown, spread, whole

ROUNDING = 1e-9  # of differences of percentages


def gap(results, goal, row, most):
    """The row against its group's dense network."""
    gaps = results.worse(f"{row.split('-', maxsplit=1)[0]}-dense", row)
    return goal, gaps.text, gaps.mean <= most + ROUNDING if gaps else None


def gaps_of_both(results, goal, group, most):
    """By the budgets of row `new`, and by the default."""
    yield gap(results, goal, f"{group}-new", most)
    yield gap(results, f"{goal}: by the default", f"{group}-default", most)


def size(results, goal, row, most):
    counts = results.values(row, at("after", "parameters")).values()
    dense = results.mean(f"{row.split('-', maxsplit=1)[0]}-dense", at("after", "parameters"))
    if not counts or dense is None:
        return goal, "", None
    share = max(counts) / dense
    return goal, f"{100 * share:.2f} %", round(share, 4) <= most


def at_most(goal, ratios, most, text):
    return goal, text, statistics.mean(ratios) <= most if ratios else None


def half_of(results, goal, plain, ours, after):
    """Loss of accuracy right after the switch, over seeds of both rows."""
    pairs = results.paired(plain, ours, drop(after), lambda theirs, mine: (theirs, mine))
    if not pairs:
        return goal, "", None
    theirs, mine = (statistics.mean(pair[i] for pair in pairs) for i in (0, 1))
    # Re-estimated statistics may bring more than the truncation takes; then there is no loss to halve.
    seeds = UNPAIRED if pairs.unpaired else "1 seed" if len(pairs) == 1 else f"{len(pairs)} seeds"
    return goal, f"{mine:.2f} against {theirs:.2f} points, {seeds}", mine <= 0.5 * max(theirs, 0.0)


def resnet(results):
    yield from gaps_of_both(results, "ResNet, 12 epochs: at most 0.3 points worse than dense", "A", 0.3)
    counts = results.values("A-new", at("after", "parameters")).values()
    yield ("ResNet: no more parameters than today's way", whole(counts),
           max(counts) <= jobs_of.TODAY_PARAMETERS if counts else None)
    macs = [count / jobs_of.TODAY_MACS for count in results.values("A-new", at("after", "macs")).values()]
    yield ("ResNet: at most 1.1 times today's multiply-adds", f"{max(macs):.3f}" if macs else "",
           max(macs) <= 1.1 if macs else None)
    ratios = results.by_seed("T-new", "T-today", at("ms_per_step_low_rank"), lambda a, b: a / b)
    yield at_most("ResNet: at most 1.1 times today's time a step, in turns", ratios, 1.1, spread(ratios, 3))
    for after, words in (("after", "statistics as they were"), ("estimated", "re-estimated")):
        goal = f"right after the switch, {words}: at most half of plain truncation's loss in accuracy"
        yield half_of(results, f"ResNet, 12 epochs, {goal}", "A-plain", "A-new", after)
        yield half_of(results, f"ResNet, four epochs, {goal} (today's way)", "A2-today", "A2-new", after)
    yield half_of(results, "ResNet, four epochs, right after the switch, statistics as they were: at most half of the loss of "
                  "today's way: by the default", "A2-today", "A2-default", "after")
    yield from gaps_of_both(results, "ResNet, four epochs: at most 0.7 points worse than dense", "A2", 0.7)


def sequences(results):
    yield from gaps_of_both(results, "Transformer at today's 72.0 %: at most 0.4 BLEU worse than dense", "C", 0.4)
    yield size(results, "Transformer at today's parameters", "C-new", 0.7197)
    for row, words in (("new", ""), ("default", ": by the default")):
        ours, scratch = (results.mean(f"C-{name}", at("bleu")) for name in (row, "lowrank"))
        known = None not in (ours, scratch)
        yield (f"Transformer: above low rank from scratch{words}", f"{ours:.2f} against {scratch:.2f}" if known else "",
               ours > scratch if known else None)
    yield gap(results, "Transformer with embeddings: at most 0.8 BLEU worse than dense", "C-embeddings", 0.8)
    yield size(results, "Transformer with embeddings: at most 55 % of the parameters", "C-embeddings", 0.55)
    yield from gaps_of_both(results, "LSTM: at most 1 % of perplexity worse than dense", "D", 1.0)
    yield gap(results, "LSTM with factorized embedding: at most 2 % of perplexity worse than dense", "D-embeddings", 2.0)
    yield size(results, "LSTM with factorized embedding: at most 45 % of the parameters", "D-embeddings", 0.45)


def not_worse(results, goal, group, row):
    """A mean difference of less than one test image is none."""
    gains, images = results.better(f"{group}-{row}", f"{group}-today"), jobs_of.GROUPS[group].test_images
    if gains and abs(gains.mean) < 100 / images:
        return goal, f"equal: {gains.text}, less than one of {images:,} test images", True
    return goal, gains.text, gains.mean > 0 if gains else None


def small(results):
    for group, name in (("E", "Fashion-MNIST"), ("E2", "digits")):
        goal = f"{name}: not worse than today's way, points better"
        yield not_worse(results, goal, group, "new")
        yield not_worse(results, f"{goal}: by the default", group, "default")


def full_width(results):
    shares = results.by_seed("F-new", "F-today", slowdown, lambda ours, drift: 100 * (ours / drift - 1))
    yield at_most("full width: statistics at most 2 % of the time of a warm-up step", shares, 2,
                  f"{spread(shares)} %" if shares else "")
    ratios = results.by_seed("F-new", "F-today", at("switch", "milliseconds"), lambda a, b: a / b)
    yield at_most("full width: switch at most 1.5 times today's", ratios, 1.5, spread(ratios, 3))


def slow_link(curves):
    """`curves`: documents of bench/exchange_curves by system."""
    for system in curve_runs.AGAINST_POWERSGD:
        goal = (f"100 Mbit/s, 2 hosts, {curve_runs.SYSTEMS[system].title}: at least the accuracy of PowerSGD on the dense network "
                "in at most its time")
        if system not in curves or "powersgd" not in curves:
            yield goal, "", None
            continue
        difference = curve_runs.Difference(curves[system], curves["powersgd"])
        yield goal, f"{difference.text}: {difference.winner(system, 'powersgd')}", difference.wins


def goals(results, curves):
    yield from resnet(results)
    yield from sequences(results)
    yield from small(results)
    yield from full_width(results)
    yield from slow_link(curves)


def goal_table(results, curves):
    words = {None: "not run yet", True: "met", False: "**missed**"}
    lines = ["| goal | result | |", "|---|---|---|"]
    lines += [f"| {goal} | {have} | {words[met]} |" for goal, have, met in goals(results, curves)]
    return [*lines, "", "A goal is of the budgeted row *two-sided, today's parameters ...* of its group, or of another row that it "
            "names; *by the default*: of the row *the default*. The curves at 100 Mbit/s are those of "
            "[exchange_curves.md](exchange_curves.md), of one seed.", ""]


# --- what to choose ---

def by_default(results):
    """The default of the programs against today's way, in every group that has both."""
    names = {"A": "ResNet-18 of width 16, 12 epochs", "A2": "the same, four epochs", "C": "Transformer", "D": "LSTM",
             "E": "Fashion-MNIST", "E2": "digits"}
    lines = ["The default against today's way at the same layers, ranks and rates, so with the same parameters and multiply-adds "
             "(rows *the default*):", "", "| network | better by | |", "|---|---:|---|"]
    for group, name in names.items():
        gain = results.better(f"{group}-default", f"{group}-today")
        lines.append(f"| {name} | {gain.text or 'no run'} | {jobs_of.GROUPS[group].metric.unit} |")
    return [*lines, ""]


def choices(results):
    """Recommendations that follow from the tables, with their numbers."""
    def gain(one, other):
        return results.better(one, other).text or "no run"

    def macs(one, other):
        ours, theirs = (results.mean(key, at("after", "macs")) for key in (one, other))
        return f"{ours / theirs:.2f} times" if ours and theirs else "not measured"
    return [
        "## What to choose", "",
        "Points of test accuracy in the short runs (ResNet-18 of width 16), mean (least to most over seeds):", "",
        "| instead of | choose | accuracy | it costs |", "|---|---|---:|---|",
        f"| plain truncation, first two stages dense by hand | the default: two-sided factors at the same layers and ranks | "
        f"{gain('B-two-today', 'B-today')} | the statistics of 20 steps; parameters, multiply-adds and bytes are the same |",
        f"| plain truncation of all layers from the second, ratio 1/4 | the default: two-sided factors at the same layers and "
        f"ranks | {gain('B-two', 'B-plain')} | the same |",
        f"| plain truncation at ratio 1/4 | `--policy two-sided`: the layers share the same parameters | "
        f"{gain('B-share', 'B-plain')} | {macs('B-share', 'B-plain')} the multiply-adds: ranks move to large images |",
        f"| first two stages dense, by hand | `--policy two-sided` | {gain('B-share', 'B-today')} | fewer parameters, "
        f"{macs('B-share', 'B-today')} the multiply-adds |",
        f"| a switch after a third of the epochs | one after half of them | {gain('B-after-3', 'B-new')} | dense steps, and the bytes "
        "of their gradients |", "",
        "The programs' default, `--policy uniform`, is in the first two rows: the paper's layers and ranks, so its parameters, "
        "multiply-adds and bytes, with two-sided factors. (Both rows ask for the same by `--policy two-sided --uniform-ranks`, with "
        "batch norms estimated again.) `factorize_policy` does the same where a run has statistics "
        "(`switching.statistics_steps`). The paper's way is `--policy paper`, or `factorize_policy::paper()`. Sharing ratio 1/4's "
        "parameters *and* multiply-adds among the layers (row *two-sided, ratio 1/4's parameters and multiply-adds shared*) against "
        f"its own ranks: {gain('B-both', 'B-two')} points; ranks are shared only on request. The elements that follow a switch are "
        "off by default; the table of elements says which of them pay.", "", *by_default(results)]
