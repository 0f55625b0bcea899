#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""train_image_classifier: the same bits for any number of threads and in every repetition, nearly the same numbers for
any number of ranks; checkpoints that go on bit for bit from before, at and after the switch."""
import signal
import subprocess

from support import TEST_IMAGES, TEST_LABELS, TINY, digests, expect, expect_equal, load, main

HYBRID = ["--epochs", "3", "--warmup-epochs", "1"]


def threads_and_ranks(programs, folder):
    for ranks in programs.rank_counts():
        one = programs.train(folder, *HYBRID, "--threads", 1, ranks=ranks)
        expect_equal(len(set(digests(one))), 3, "epochs with parameters of their own")
        expect_equal(one["options"]["ranks"], max(1, ranks), "ranks")
        two = programs.train(folder, *HYBRID, "--threads", 2, ranks=ranks)
        expect_equal(digests(two), digests(one), f"parameters after each epoch, 2 threads, {ranks} ranks")
        expect([e["low_rank"] for e in one["history"]] == [False, True, True], "the switch is after epoch 1")
        switch = one["switch"]
        expect_equal(switch["parameters_before"], one["before"]["parameters"], "parameters before")
        expect_equal(switch["parameters_after"], one["after"]["parameters"], "parameters after")
        expect(switch["milliseconds"] > 0 and 0 < switch["kept_energy"] < 1, "there was an SVD")
        expect(one["ms_per_step_dense"] > 0 and one["ms_per_step_low_rank"] > 0, "steps take time")


def policies(programs, folder):
    """Every policy and budget: what they promise of size and ranks, with the same bits after an interruption."""
    short = [*HYBRID, "--statistics-steps", 3]
    paper = programs.train(folder, *HYBRID, "--policy", "paper")
    expect_equal(paper["options"]["switch"]["statistics_steps"], 0, "the paper's way measures nothing")
    for policy in ("data-aware", "two-sided"):
        shared = programs.train(folder, *short, "--policy", policy, "--test-switch", "--norm-batches", 2)
        expect(shared["after"]["parameters"] <= paper["after"]["parameters"], f"{policy}: the parameters are shared")
        ranks = [layer["rank"] for layer in shared["switch"]["layers"]]
        expect(ranks != [layer["rank"] for layer in paper["switch"]["layers"]], f"{policy}: ranks of their own")
        expect(shared["switch"]["predicted_loss"] > 0, f"{policy}: predicted loss")
        for name in ("before", "after", "estimated"):
            expect(0 <= shared["switch"][f"accuracy_{name}"] <= 100, f"{policy}: accuracy {name} the switch")
    budget = programs.train(folder, *short, "--policy", "two-sided", "--budget", 0.5, "--mac-budget", 0.6)
    expect(budget["after"]["parameters"] <= 0.5 * budget["before"]["parameters"], "half of the parameters")
    expect(budget["after"]["macs"] <= 0.6 * budget["before"]["macs"], "60 % of the multiply-adds")
    normed = programs.train(folder, *short, "--policy", "two-sided", "--budget", 0.5, "--extra-norm", 2)
    expect(normed["after"]["parameters"] <= 0.5 * normed["before"]["parameters"], "half of the parameters, with norms")
    limit = 2 * budget["before"]["parameters"]
    by_bytes = programs.train(folder, *short, "--byte-budget", limit)
    expect(by_bytes["after"]["bytes_per_step"] <= limit, "half of the bytes")
    rows = budget["switch"]["rows"]
    expect(rows[0]["why"] == "dense: among the first layers" and rows[0]["dense"] and rows[0]["rank"] is None, "rows in the JSON")
    expect_equal(budget["after"]["parameters"] - budget["before"]["parameters"],
                 sum(row["parameters_after"] - row["parameters_before"] for row in rows), "parameters in the rows")
    uniform = programs.train(folder, *short, "--policy", "two-sided", "--uniform-ranks")
    expect_equal(digests(programs.train(folder, *short)), digests(uniform), "the default: two-sided factors at the paper's ranks")
    expect_equal([layer["rank"] for layer in uniform["switch"]["layers"]],
                 [layer["rank"] for layer in paper["switch"]["layers"]], "uniform ranks")
    by_loss = ["--epochs", 4, "--warmup-epochs", 3, "--statistics-steps", 3, "--policy", "two-sided", "--switch-when",
               "predicted-loss"]
    loss = programs.train(folder, *by_loss)
    expect(2 <= loss["switch"]["after_epochs"] <= 3 and "loss" in loss["switch"]["why"], "the moment by predicted loss")
    stable = programs.train(folder, "--epochs", 4, "--warmup-epochs", 3, "--policy", "cuttlefish")
    expect("stable ranks" in stable["switch"]["why"], "Cuttlefish's moment")
    quick = ["--epochs", 4, "--warmup-epochs", 3, "--policy", "cuttlefish", "--cuttlefish-window", 1,
             "--cuttlefish-tolerance", 1000]
    settled = programs.train(folder, *quick)
    expect_equal((settled["switch"]["after_epochs"], settled["switch"]["why"]),
                 (2, "the stable ranks of all layers have settled"), "Cuttlefish with a small window")
    expect_equal([settled["options"]["switch"]["cuttlefish"][name] for name in ("window", "mean_of", "tolerance")], [1, 2, 1000],
                 "Cuttlefish's options")
    published = programs.train(folder, "--epochs", 2, "--warmup-epochs", 1, "--policy", "cuttlefish", "--cuttlefish-preset",
                               "resnet50", "--cuttlefish-floored")["options"]["switch"]["cuttlefish"]
    expect_equal((published["window"], published["tolerance"], published["least_share"], published["floored"]),
                 (5, 0.33, 0.2, True), "a published setting")
    _, err = programs.run("train_image_classifier", *TINY, *HYBRID, "--cuttlefish-window", 3, fails=True)
    expect("no effect without --policy cuttlefish" in err, f"Cuttlefish's options need its policy:\n{err}")
    out, _ = programs.run("train_image_classifier", *TINY, *HYBRID, "--policy", "cuttlefish", "--statistics-steps", 100,
                          "--progress", "none")
    for text in ("so --warmup-epochs 1 decides", "--statistics-steps 100: an epoch has 23 steps"):
        expect(text in out, f"it says {text}:\n{out}")
    _, err = programs.run("train_image_classifier", *TINY, *HYBRID, "--policy", "cuttlefish", "--least-gain", 1000, fails=True)
    expect("no stage gains 1000" in err, f"stages that gain too little are named:\n{err}")
    everything = [*short, "--policy", "two-sided", "--carry-state", "--frobenius-decay", 1e-4, "--ramp-steps", 5,
                  "--ramp-start", 0.1, "--norm-batches", 2, "--project-every", 9]
    whole = programs.train(folder, *everything)
    expect(digests(whole) != digests(budget), "other parameters")
    for steps in (10, 21, 23, 24):
        file = folder / f"policy-{steps}.safetensors"
        programs.run("train_image_classifier", "--width", 8, "--batch", 64, "--progress", "none", *everything,
                     "--checkpoint", file, "--stop-after", steps)
        again = programs.train(folder, *everything, "--checkpoint", file, "--resume")
        expect_equal(digests(again), digests(whole), f"parameters after stopping at step {steps}")
    norms = programs.train(folder, *short, "--extra-norm", 3, "--save", folder / "norms.safetensors")
    expect_equal(norms["options"]["switch"]["extra_norm_batches"], 3, "norms between factors")
    programs.run("predict", "--model", folder / "norms.safetensors", TEST_IMAGES, "--labels", TEST_LABELS, "--json",
                 folder / "norms.json")
    # An image or two may be on the edge: the loader's batches are others.
    expect(abs(load(folder / "norms.json")["files"][0]["accuracy"] - norms["accuracy"]) < 1, "the saved network predicts the same")
    fading = programs.train(folder, *HYBRID, "--anneal-epochs", 1, "--test-switch")
    expect_equal(fading["options"]["switch"]["anneal_epochs"], 1, "epochs of annealing")
    expect_equal(fading["switch"]["accuracy_after"], fading["switch"]["accuracy_before"], "nothing is lost at the switch")
    _, err = programs.run("train_image_classifier", *TINY, *HYBRID, "--extra-norm", 3, "--carry-state", fails=True)
    expect("together with carry_state" in err, f"norms with a carried state are refused:\n{err}")
    out, _ = programs.run("train_image_classifier", *TINY, *HYBRID, "--policy", "two-sided", "--explain", "--progress",
                          "none")
    for text in ("multiply-adds", "dense: among the first layers", "dense: the last layer", "whole network", "budget"):
        expect(text in out, f"--explain says {text}:\n{out}")


def same_trajectory(programs, folder):
    """Without batch norm, no image's gradient depends on the others: ranks only change rounding."""
    plain = [*HYBRID, "--no-batch-norm", "--lr", "0.02"]
    alone = programs.train(folder, *plain)
    for ranks in [n for n in programs.rank_counts() if n > 1]:
        many = programs.train(folder, *plain, ranks=ranks)
        for a, b in zip(alone["history"], many["history"]):
            distance = abs(a["train_loss"] - b["train_loss"]) / a["train_loss"]
            expect(distance < 1e-3, f"training loss on {ranks} ranks: {b['train_loss']}, alone {a['train_loss']}")


def resume(programs, folder):
    """Runs that end early, at each kind of moment, and go on; 23 steps an epoch, the switch is after the first."""
    whole = programs.train(folder, *HYBRID)
    for ranks in [n for n in programs.rank_counts() if n in (0, 2)]:
        undisturbed = programs.train(folder, *HYBRID, ranks=ranks) if ranks else whole
        for steps in (7, 23, 30):
            file = folder / f"stop-{ranks}-{steps}.safetensors"
            stop = [*HYBRID, "--checkpoint", file, "--stop-after", steps]
            programs.run("train_image_classifier", "--width", 8, "--batch", 64, "--progress", "none", *stop, ranks=ranks)
            again = programs.train(folder, *HYBRID, "--checkpoint", file, "--resume", ranks=ranks)
            expect_equal(digests(again), digests(undisturbed), f"parameters after stopping at step {steps}")
            expect_equal(again["accuracy"], undisturbed["accuracy"], f"accuracy after stopping at step {steps}")
        # A run that had ended ends again, with the same result.
        done = programs.train(folder, *HYBRID, "--checkpoint", file, "--resume", ranks=ranks)
        expect_equal(digests(done), digests(undisturbed), "parameters of a finished run")


def killed(programs, folder):
    """SIGKILL in the middle, once (tests/slow does it a hundred times)."""
    file = folder / "killed.safetensors"
    arguments = ["--width", 8, "--batch", 64, "--progress", "none", *HYBRID, "--checkpoint", file, "--checkpoint-every", 5]
    process = subprocess.Popen(programs.command("train_image_classifier", *arguments), stdout=subprocess.DEVNULL)
    while process.poll() is None and not file.exists():
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = programs.train(folder, *HYBRID, "--checkpoint", file, "--checkpoint-every", 5, "--resume")
    expect_equal(digests(again), digests(programs.train(folder, *HYBRID)), "parameters after SIGKILL")


def interrupted(programs, folder):
    """SIGINT and SIGTERM: the step ends, checkpoint and JSON are written, and the run goes on bit for bit."""
    run = [*TINY, "--epochs", 30, "--warmup-epochs", 1, "--threads", 1]
    whole = programs.train(folder, *run[len(TINY):])
    for ranks in [n for n in programs.rank_counts() if n in (0, 2)]:
        undisturbed = programs.train(folder, *run[len(TINY):], ranks=ranks) if ranks else whole
        for number, all_ranks in [(signal.SIGINT, True), (signal.SIGTERM, False)]:
            file, result = folder / f"signal-{ranks}-{number}.safetensors", folder / f"signal-{ranks}-{number}.json"
            arguments = [*run, "--checkpoint", file, "--checkpoint-every", 10, "--json", result]
            status, output = programs.signalled("train_image_classifier", *arguments, ready=file, number=number,
                                                ranks=ranks, all_ranks=all_ranks)
            expect_equal(status, 128 + number, f"exit status after signal {number} on {ranks} ranks: {output}")
            expect("interrupted in epoch" in output and "--resume goes on" in output, f"it says so: {output}")
            told = load(result)
            expect_equal((told["interrupted"], told["finished"], told["signal"], told["diverged"]),
                         (True, False, number, None), "the JSON of an interrupted run")
            again = programs.train(folder, *run[len(TINY):], "--checkpoint", file, "--resume", ranks=ranks)
            expect_equal(digests(again), digests(undisturbed), f"parameters after signal {number} on {ranks} ranks")
            expect_equal((again["interrupted"], again["finished"]), (False, True), "the JSON of a finished run")
    # The second one ends it at once, in the middle of a long step.
    ready = folder / "second.safetensors"
    status, _ = programs.signalled("train_image_classifier", "--width", 64, "--batch", 1437, "--epochs", 1000, "--checkpoint",
                                   ready, ready=ready, number=signal.SIGTERM, then=signal.SIGINT)
    expect(status in (-signal.SIGTERM, -signal.SIGINT), f"status after two signals: {status}")


def diverged(programs, folder):
    """A learning rate of 1e9: an error, an exit status, and the JSON; the checkpoint from before it stays."""
    for ranks in [n for n in programs.rank_counts() if n in (0, 2)]:
        file, result = folder / f"diverged-{ranks}.safetensors", folder / f"diverged-{ranks}.json"
        base = [*TINY, "--mode", "dense", "--schedule", "constant", "--lr-warmup", 0, "--epochs", 3, "--checkpoint", file,
                "--json", result]
        _, error = programs.run("train_image_classifier", *base, "--lr", 1e9, "--checkpoint-every", 1, ranks=ranks, fails=True)
        expect("training diverged: no finite loss for" in error and "learning rate 1e+09" in error, error)
        told = load(result)
        expect("training diverged" in told["diverged"] and not told["finished"], "the JSON of a run that diverged")
        # What was saved before the loss became NaN is not overwritten by what came after.
        values = file.read_bytes()
        expect(b"training.record" in values and b"seen nan" not in values, "a checkpoint with a finite loss")


def stopped(programs, folder):
    result = folder / "stopped.json"
    programs.run("train_image_classifier", *TINY, *HYBRID, "--checkpoint", folder / "stopped", "--stop-after", 30,
                 "--json", result)
    told = load(result)
    expect_equal((told["finished"], told["interrupted"], len(told["history"])), (False, False, 1), "JSON of --stop-after")
    expect_equal(told["accuracy"], told["history"][0]["test_accuracy"], "the last accuracy that there is")


def modes(programs, folder):
    dense = programs.train(folder, "--mode", "dense", "--epochs", 2, "--schedule", "multistep", "--label-smoothing", 0.1)
    expect("switch" not in dense and dense["before"] == dense["after"], "a dense run has no switch")
    low = programs.train(folder, "--mode", "lowrank", "--epochs", 2, "--schedule", "constant", "--pad-crop", 1, "--flip",
                         "--clip-norm", 1)
    expect("switch" not in low and low["after"]["parameters"] < dense["after"]["parameters"], "low rank from the start")
    expect(all(epoch["low_rank"] for epoch in low["history"]), "low rank in all epochs")
    for model in ("mlp", "small-vgg"):
        result = programs.train(folder, *HYBRID, "--model", model, "--rank-ratio", 0.125)
        expect(result["after"]["parameters"] < result["before"]["parameters"], f"{model} becomes smaller")


def narrow_resnet18(programs, folder):
    """The zoo's ResNet-18 with 8 channels in its first stage (TINY's width): parameters as counted by hand."""
    shape = ["--model", "resnet18_cifar_stem_bn", "--epochs", 1]
    dense = programs.train(folder, *shape, "--mode", "dense")
    blocks = sum(9 * c * (into + 3 * c) + 8 * c + (into * c + 2 * c if into < c else 0)
                 for into, c in [(8, 8), (8, 16), (16, 32), (32, 64)])
    expect_equal(dense["after"]["parameters"], 9 * 8 + 2 * 8 + blocks + 64 * 10 + 10, "parameters")
    hybrid = programs.train(folder, *shape, "--mode", "lowrank", "--first-layer", 4)
    pure = programs.train(folder, *shape, "--mode", "lowrank", "--first-layer", 2)
    sizes = [result["after"]["parameters"] for result in (pure, hybrid, dense)]
    expect(sizes[0] < sizes[1] < sizes[2], f"pure low rank, hybrid, dense: {sizes}")


def test(programs, folder):
    threads_and_ranks(programs, folder)
    same_trajectory(programs, folder)
    policies(programs, folder)
    resume(programs, folder)
    killed(programs, folder)
    interrupted(programs, folder)
    diverged(programs, folder)
    stopped(programs, folder)
    modes(programs, folder)
    narrow_resnet18(programs, folder)


main(test)
