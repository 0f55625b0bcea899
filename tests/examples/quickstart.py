#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""quickstart on 1 and 2 ranks: its JSON, in a file and on standard output, its table and its plot."""
import json
import re
import shutil

from support import expect, expect_equal, load, main

FAST = ["--epochs", "2", "--warmup-epochs", "1", "--seeds", "2", "--width", "8", "--first-layer", "2"]
KEYS = {"mode", "parameters", "macs", "bytes_per_step", "ms_per_step", "accuracy_mean", "accuracy_std", "kept_energy",
        "switch_ms", "waiting_share", "cpu_ms_per_step"}


def check(document, ranks):
    expect_equal([entry["mode"] for entry in document], ["dense", "hybrid"], "modes")
    dense, hybrid = document
    for entry in document:
        expect(KEYS <= set(entry), f"missing: {KEYS - set(entry)}")
        expect_equal(entry["ranks"], ranks, "ranks")
        expect_equal(entry["bytes_per_step"], 4 * entry["parameters"], "bytes are those of float gradients")
        expect(entry["ms_per_step"] > 0 and entry["cpu_ms_per_step"] > 0, "a step takes time")
        share = entry["waiting_share"]
        expect(0 < share < 1 if ranks > 1 else share == 0, f"ranks wait for each other, one alone does not: {share}")
        expect(0 <= entry["accuracy_mean"] <= 100 and entry["accuracy_std"] >= 0, "accuracy in percent")
        accuracies = [run["accuracy"] for run in entry["runs"]]
        expect_equal(len(accuracies), 2, "runs")
        expect(abs(sum(accuracies) / 2 - entry["accuracy_mean"]) < 1e-9, "the mean is that of the runs")
        for run in entry["runs"]:
            expect_equal(run["accuracy"], run["history"][-1]["test_accuracy"], "accuracy is that of the last epoch")
    expect_equal((dense["kept_energy"], dense["switch_ms"]), (1, 0), "dense switch")
    expect(0 < hybrid["kept_energy"] < 1 and hybrid["switch_ms"] > 0, "the hybrid run contains the SVD")
    expect(hybrid["parameters"] < dense["parameters"] and hybrid["macs"] < dense["macs"], "hybrid is smaller")
    # Both modes are the same run until the switch.
    for one, other in zip(dense["runs"], hybrid["runs"]):
        expect_equal(one["history"][0]["train_loss"], other["history"][0]["train_loss"], "loss of the warm-up")


def check_plot(svg):
    expect(svg.rstrip().endswith("</svg>"), "the plot is an SVG file")
    texts = re.findall(r"<text>(?:<tspan[^>]*>)*([^<]*)<", svg)
    for label, count in [("test accuracy / %", 3), ("test loss / nat", 1), ("epoch", 2), ("training time / s", 1), ("switch", 4),
                         ("gradients given to the exchange by a rank / MB", 1), ("dense", 4), ("hybrid", 4)]:
        expect_equal(texts.count(label), count, f"{label!r} in the plot")


def test(programs, folder):
    for ranks in [n for n in programs.rank_counts() if n < 4]:
        target, plot = folder / f"r{ranks}.json", folder / f"r{ranks}.svg"
        out, _ = programs.run("quickstart", *FAST, "--json", target, "--plot", plot, ranks=ranks)
        check(load(target), max(1, ranks))
        expect(out.count("kept energy\n") == 1 and "hybrid" in out, f"one table, printed once:\n{out}")
        if shutil.which("gnuplot"):
            check_plot(plot.read_text(encoding="utf-8"))
        else:
            expect("gnuplot is not installed" in out and not plot.exists(), "a message instead of a plot")
    ranks = programs.rank_counts()[-1] and 2
    out, err = programs.run("quickstart", *FAST, "--json", "-", ranks=ranks)
    check(json.loads(out), max(1, ranks))
    expect("parameters" in err, "everything else goes to standard error")


main(test)
