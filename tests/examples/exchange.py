#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""--compress and --tune-exchange: every way to exchange gradients trains on two ranks, sends the bytes that it should and
goes on bit for bit; what does not go together is refused in words."""
import math

from support import TINY, digests, expect, expect_equal, load, main

SHORT = ["--epochs", "2", "--warmup-epochs", "1"]
SIGNUM = ["--momentum", "0", "--lr", "0.001"]
WAYS = {
    "none": [],
    "bf16": [],
    "fp16": [],
    "powersgd": ["--compress-rank", "1"],
    "powersgd-aggregated": [],
    "signum": SIGNUM,
    "topk": ["--compress-ratio", "0.05"],
    "randomk": ["--compress-rank", "2"],
    "randomblock": ["--compress-ratio", "0.1"],
    "dgc": ["--compress-ratio", "0.05", "--momentum", "0"],
    "efsign": ["--compress-memory", "feedback"],
    "doublesqueeze": [],
    "onebit": ["--compress-route", "two-hop"],
    "qsgd": ["--compress-bits", "8", "--compress-bucket", "128"],
    "terngrad": [],
    "binary": [],
    "atomo": ["--compress-sparsity", "2"],
    "atomo-entry": ["--compress-ratio", "0.05"],
}
VARYING = ("atomo", "atomo-entry")  # lengths that depend on the gradients


def every_way(programs, folder):
    ranks = 2 if programs.mpirun else 0
    payload = {}
    for way, more in WAYS.items():
        arguments = [*SHORT, "--compress", way, *more]
        whole = programs.train(folder, *arguments, ranks=ranks)
        exchange = whole["exchange"]
        payload[way] = exchange["payload_bytes"]
        expect_equal(exchange["compress"], way, "compress in the JSON")
        if way not in VARYING:
            expect_equal(whole["after"]["bytes_per_step"], payload[way], f"bytes of {way}")
        expect(math.isfinite(whole["history"][-1]["train_loss"]), f"{way}: the loss is a number")
        if ranks and way in ("none", "bf16", "fp16"):
            expect(exchange["thread_processor_ms"] > 0, "the thread's processor time is told")
        file = folder / f"{way}.safetensors"
        programs.run("train_image_classifier", *TINY, *arguments, "--checkpoint", file, "--stop-after", 26, ranks=ranks)
        again = programs.train(folder, *arguments, "--checkpoint", file, "--resume", ranks=ranks)
        expect_equal(digests(again), digests(whole), f"parameters after a stop with {way}")
    expect_equal(payload["bf16"], payload["none"] // 2, "bytes of bf16")
    expect_equal(payload["fp16"], payload["none"] // 2, "bytes of fp16")
    expect(payload["signum"] * 31 < payload["none"], "a bit a value")
    expect(payload["powersgd"] < payload["powersgd-aggregated"] < payload["none"], "products of rank 1, 2")
    expect(payload["topk"] * 9 < payload["none"], "a twentieth of the values, with indices")
    expect(payload["qsgd"] * 3 < payload["none"], "eight bits a value, and norms")
    if ranks:
        signs = programs.train(folder, *SHORT, "--compress", "signum", "--compress-route", "two-hop", *SIGNUM, ranks=ranks)
        gathered = programs.train(folder, *SHORT, "--compress", "signum", *SIGNUM, ranks=ranks)
        expect_equal(digests(signs), digests(gathered), "parameters of Signum by two hops")
    dense = programs.train(folder, *SHORT, "--compress", "powersgd", "--compress-phase", "dense", ranks=ranks)
    expect_equal(dense["after"]["bytes_per_step"], 4 * dense["after"]["parameters"], "Powerfish sends whole factors")


def by_bucket(programs, folder):
    ranks = 2 if programs.mpirun else 0
    arguments = [*SHORT, "--compress", "topk", "--compress-ratio", "0.05"]
    whole = programs.train(folder, *arguments, ranks=ranks)
    parts = programs.train(folder, *arguments, "--compress-by-bucket", ranks=ranks)
    expect(parts["exchange"]["by_bucket"], "compressed by bucket")
    expect_equal(digests(parts), digests(whole), "parameters with top-k, bucket by bucket")


def rare(programs, folder):
    ranks = 2 if programs.mpirun else 0
    arguments = [*SHORT, "--local-steps", "5", "--outer-fragments", "2", "--outer-delay", "1", "--compress", "topk",
                 "--compress-ratio", "0.5"]
    whole = programs.train(folder, *arguments, ranks=ranks)
    done = whole["exchange"]["rare"]
    expect("every 5 steps" in done["options"], f"the outer loop's options: {done}")
    expect(done["outer_steps"] > 2, f"outer steps: {done}")
    expect_equal(whole["exchange"]["payload_bytes"], 0, "bytes of gradients")
    if ranks:
        expect(0 < done["payload_bytes_a_step"] < whole["after"]["parameters"], f"bytes a step: {done}")
    expect(math.isfinite(whole["history"][-1]["train_loss"]), "the loss is a number")
    refused(programs, "--local-steps", "5", "--outer-rate", "-1", says=["outer_rate -1"])
    refused(programs, "--compress-by-bucket", says=["--compress-by-bucket needs a compressor"])


def pruned(programs, folder):
    ranks = 2 if programs.mpirun else 0
    for method in ("grasp", "magnitude"):
        arguments = [*SHORT, "--prune", method, "--prune-ratio", "0.5", "--prune-epoch", "1"]
        whole = programs.train(folder, *arguments, ranks=ranks)
        mask = whole["exchange"]["pruning"]
        expect(2 * mask["kept"] - mask["prunable"] in (0, 1), f"half of the weights are kept: {mask}")
        expect_equal(whole["exchange"]["payload_bytes"], 4 * mask["parameters"], "bytes of what remains")
        file = folder / f"{method}.safetensors"
        programs.run("train_image_classifier", *TINY, *arguments, "--checkpoint", file, "--stop-after", 26, ranks=ranks)
        again = programs.train(folder, *arguments, "--checkpoint", file, "--resume", ranks=ranks)
        expect_equal(digests(again), digests(whole), f"parameters after a stop, pruned by {method}")
    signs = programs.train(folder, *SHORT, "--prune", "grasp", "--prune-ternary", ranks=ranks)
    expect(10 * signs["exchange"]["payload_bytes"] < 4 * signs["exchange"]["pruning"]["parameters"], "two bits a survivor")
    refused(programs, "--prune", "grasp", "--compress", "topk", says=["pruning together with a compressor"])


def shrinking(programs, folder):
    ranks = 2 if programs.mpirun else 0
    arguments = ["--epochs", "4", "--warmup-epochs", "1", "--shrink-rank", "0.9", "--shrink-patience", "1",
                 "--scale-sparsity", "0.001"]
    whole = programs.train(folder, *arguments, ranks=ranks)
    expect(whole["after"]["parameters"] < whole["switch"]["parameters_after"], "ranks have fallen since the switch")
    expect_equal(whole["exchange"]["payload_bytes"], 4 * whole["after"]["parameters"], "bytes of the smaller network")
    expect(whole["exchange"]["shrink_rank"].startswith("below 0.9"), f"the options: {whole['exchange']}")
    file = folder / "shrinking.safetensors"
    programs.run("train_image_classifier", *TINY, *arguments, "--checkpoint", file, "--stop-after", 50, ranks=ranks)
    again = programs.train(folder, *arguments, "--checkpoint", file, "--resume", ranks=ranks)
    expect_equal(digests(again), digests(whole), "parameters after a stop between two epochs with other ranks")
    refused(programs, "--prune", "grasp", "--shrink-rank", "0.1", says=["shrinking ranks together with pruning"])


def other_programs(programs, folder):
    text = folder / "text.txt"
    text.write_text("".join(f"the cat sees {i % 7} birds .\n" for i in range(300)))
    target = folder / "lm.json"
    programs.run("train_language_model", "--data", text, "--width", 16, "--batch", 8, "--segment", 15, "--eval-streams", 4,
                 "--epochs", 2, "--warmup-epochs", 1, "--progress", "none", "--compress", "powersgd", "--compress-rank", 1,
                 "--json", target, ranks=2 if programs.mpirun else 0)
    expect(load(target)["exchange"]["compressor"].startswith("PowerSGD, rank 1"), "the language model's compressor")


def tuned(programs, folder):
    ranks = 2 if programs.mpirun else 0
    file = folder / "tuned.safetensors"
    whole = programs.train(folder, *SHORT, "--tune-exchange", "--checkpoint", file, "--checkpoint-every", 10, ranks=ranks)
    plan = whole["exchange"]["plan"]
    expect((plan["measured_mbit_per_second"] > 0) == (ranks == 2), f"measured: {plan}")
    programs.run("train_image_classifier", *TINY, *SHORT, "--tune-exchange", "--checkpoint", file, "--resume", ranks=ranks)


def refused(programs, *arguments, says):
    _, err = programs.run("train_image_classifier", *TINY, *arguments, fails=True)
    for part in says:
        expect(part in err, f"{err!r} does not say {part!r}")


def nonsense(programs, folder):
    refused(programs, "--compress", "zip", says=["zip not in"])
    refused(programs, "--compress", "signum", says=["Signum", "needs SGD without momentum", "momentum 0.9"])
    refused(programs, "--compress", "signum", *SIGNUM, "--clip-norm", "1", says=["it needs --clip-norm 0"])
    refused(programs, "--compress", "bf16", "--compress-rank", "2", says=["--compress-rank 2 means nothing for --compress bf16"])
    refused(programs, "--compress", "topk", "--compress-ratio", "1.5", says=["top_k: ratio 1.5"])
    refused(programs, "--compress", "accordion", "--compress-interval", "0", says=["accordion: interval 0 is not at least 1"])
    refused(programs, "--compress", "accordion-topk", "--compress-threshold", "-0.5", says=["accordion: threshold -0.5"])
    refused(programs, "--compress", "topk", "--compress-interval", "2", says=["--compress-interval 2 means nothing for --compress topk"])
    refused(programs, "--compress-phase", "dense", says=["--compress-phase dense", "none"])
    refused(programs, "--compress", "powersgd", "--compress-rank", "0", says=["--compress-rank"])


def test(programs, folder):
    every_way(programs, folder)
    by_bucket(programs, folder)
    rare(programs, folder)
    pruned(programs, folder)
    shrinking(programs, folder)
    other_programs(programs, folder)
    tuned(programs, folder)
    nonsense(programs, folder)


main(test)
