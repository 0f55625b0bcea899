#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""plan's counts are those of tests/golden/zoo.json, its bytes those of bench/compressor_bytes.py, and its times those of
bench/scaling_model.py on a link where hosts lose no time; budgets are met; weights with statistics give losses."""
import json
import math
import pathlib
import sys

from support import expect, expect_equal, load, main

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import compressor_bytes as sizes  # noqa: E402
import scaling_model as model  # noqa: E402

GOLDEN = json.loads((ROOT / "tests" / "golden" / "zoo.json").read_text(encoding="utf-8"))["models"]
COUNTS = {(row["model"], row["mode"]): (row["parameters"], row["macs"]) for row in GOLDEN}


def rows_of(document):
    return {(row["network"], row["compressor"]): row for row in document["ways"]}


def check_counts(programs):
    for name in ("resnet18_cifar", "vgg19_bn", "resnet50", "lstm_wikitext2", "transformer_multi30k"):
        out, _ = programs.run("plan", "--model", name, "--budgets", 0.6, "--compressors", "none", "--json", "-")
        rows = rows_of(json.loads(out))
        for mode in ("dense", "hybrid"):
            row = rows[mode, "none"]
            expect_equal((row["parameters"], row["macs"]), COUNTS[name, mode], f"{name}, {mode}: parameters, MACs")
        dense, budget = (rows[network, "none"]["parameters"] for network in ("dense", "budget 0.6"))
        expect(0.57 * dense < budget <= 0.6 * dense, f"{name}: a budget of 0.6 gives {budget} of {dense} parameters")


def check_times(document):
    cluster_of = {ranks: model.Cluster(ranks, model.Link(document["gbit"] * 1e9 / 8, document["latency_us"] * 1e-6))
                  for ranks in document["ranks"]}
    for (network, compressor), row in rows_of(document).items():
        expect_equal(row["compute_seconds"], 3 * row["macs"] * document["batch"] / (document["gmacs"] * 1e9), network)
        compute, parameters = row["compute_seconds"], row["parameters"]
        buckets = tuple(model.Bucket(size, compute * (1 + 2 * done) / 3) for size, done in row["buckets"])
        expect_equal(sum(b.size for b in buckets), 4 * parameters, f"{network}: bytes of its buckets")
        expect_equal(row["buckets"][-1][1], 1, f"{network}: the last bucket ends the backward pass")
        whole = model.Network(buckets, compute, 1e-9 * parameters)
        for ranks, seconds in zip(document["ranks"], row["seconds"]):
            if compressor in ("none", "bf16"):
                kind, factor = ("sum", 1) if compressor == "none" else ("narrow", 0.5)
                want = model.overlapped(whole, cluster_of[ranks], kind, factor)
            else:
                if network not in ("dense", "hybrid"):
                    continue
                shapes = sizes.resnet18(network)
                messages = sizes.power_sgd(shapes, 4) if compressor == "powersgd" else sizes.signum(shapes)
                expect_equal(row["payload_bytes"], sizes.payload(messages, ranks), f"{network}, {compressor}: payload")
                each = 3.5e-9 if compressor == "powersgd" else 0.85e-9 + 0.082e-9 * ranks
                collectives = [part for m in messages for part in m.collectives(ranks)]
                want = model.compressed(whole, cluster_of[ranks], model.Codec(each * parameters), collectives)
            expect(math.isclose(seconds, want.total, rel_tol=1e-9),
                   f"{network}, {compressor}, {ranks} ranks: {seconds} s, by the model {want.total}")


def check_advice(document):
    for column, name in enumerate(document["advised"]):
        times = {row["network"] + ("" if row["compressor"] == "none" else f" with {row['compressor']}"): row["seconds"][column]
                 for row in document["ways"]}
        fast = [way for way, seconds in times.items() if seconds <= times["dense"] / 2]
        expect_equal(name, fast[0], "the first row of twice the speed")


def check_page(programs):
    """docs/choose.md has what its command prints."""
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("build/examples/plan"))
    out, text = programs.run(*command.replace("build/examples/", "").split(), "--json", "-")
    for row in json.loads(out)["ways"]:
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in row["seconds"])
        want = (f"| {row['network']} | {row['compressor']} | {row['parameters']:,} | {row['macs']:,} | "
                f"{row['payload_bytes']:,.0f} | {times} |")
        expect(want in page, f"{want} is not in docs/choose.md")
    expect(f"> {text.splitlines()[-1]}\n" in page, f"{text.splitlines()[-1]} is not in docs/choose.md")


def check_weights(programs, folder):
    """A trained network's budgets are distributed by the predicted loss."""
    net = ["--width", 8, "--epochs", 1, "--mode", "dense"]
    programs.run("train_image_classifier", *net, "--batch", 64, "--progress", "none", "--save",
                 folder / "net.safetensors", "--save-statistics", folder / "seen.safetensors")
    arguments = ["--model", "small-resnet", "--width", 8, "--image", 8, 8, 1, "--weights", folder / "net.safetensors",
                 "--budgets", 0.6, 0.3, "--compressors", "none", "--json", folder / "plan.json"]
    text, _ = programs.run("plan", *arguments, "--statistics", folder / "seen.safetensors")
    rows = rows_of(load(folder / "plan.json"))
    losses = [rows[f"budget {share}", "none"]["predicted_loss"] for share in ("0.6", "0.3")]
    expect(0 < losses[0] < losses[1] and "predicted loss" in text, f"losses {losses} in\n{text}")
    dense = rows["dense", "none"]["parameters"]
    expect(rows["budget 0.3", "none"]["parameters"] <= 0.3 * dense, "a budget is met")


def test(programs, folder):
    check_counts(programs)
    out, table = programs.run("plan", "--ranks", 1, 2, 6, 64, "--json", "-")
    document = json.loads(out)
    check_times(document)
    check_advice(document)
    for text in ("11,173,834", "3,336,138", "619,128", f"64 ranks, 1 Gbit/s: {document['advised'][-1]},"):
        expect(text in table, f"{text} is not in\n{table}")
    check_page(programs)
    check_weights(programs, folder)
    for arguments, problem in [(["--budgets", 0.001], "--budgets: rank 1"), (["--model", "resnet"], "--model"),
                               (["--statistics", "x"], "needs --weights"), (["--weights", "/nowhere"], "/nowhere")]:
        _, refused = programs.run("plan", *arguments, fails=True)
        expect(problem in refused and len(refused.splitlines()) == 1, f"{arguments}: {refused}")


main(test)
