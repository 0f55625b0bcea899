#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""lottery_ticket: counts of every level, level 0 as an ordinary run, the same bits after a stop anywhere, several ranks,
refused options."""
import math
import shutil
import signal

from support import TEST_IMAGES, TEST_LABELS, TINY, digests, expect, expect_equal, load, main

PROGRAM = "lottery_ticket"
SHORT = ["--epochs", 2, "--levels", 2]
STEPS = 23  # an epoch


def search(programs, folder, *arguments, ranks=0):
    target = folder / "tickets.json"
    target.unlink(missing_ok=True)
    out, _ = programs.run(PROGRAM, *TINY, "--json", target, *arguments, ranks=ranks)
    return load(target), out


def bits(result):
    """The parameters after every epoch of every run."""
    return [digests(run) for run in [result["start"], *result["levels"]] if run]


def levels(programs, folder):
    result, out = search(programs, folder, *SHORT, "--threads", 2)
    rows = result["levels"]
    expect_equal([row["level"] for row in rows], [0, 1, 2], "levels")
    for before, row in zip(rows, rows[1:]):
        expect_equal(row["kept"], before["kept"] - math.ceil(0.2 * before["kept"]), "remaining weights")
        expect_equal(before["kept"] - row["kept"], before["parameters"] - row["parameters"], "parameters")
    for row in rows:
        expect_equal(row["bytes"], 4 * row["parameters"], "bytes of a step")
        expect_equal((row["dense_bytes"], row["macs"]), (4 * rows[0]["parameters"], rows[0]["macs"]), "dense costs")
        expect_equal(row["epochs"], 2 * (row["level"] + 1), "epochs so far")
        expect(f"{row['parameters']:,}" in out, f"a row of level {row['level']}:\n{out}")
    expect(rows[0]["processor_seconds"] < rows[1]["processor_seconds"] < rows[2]["processor_seconds"], "costs so far")
    expect_equal(result["accuracy"], rows[2]["history"][1]["test_accuracy"], "accuracy of the last epoch")
    dense = programs.train(folder, "--mode", "dense", "--epochs", 2)
    expect_equal(digests(rows[0]), digests(dense), "level 0 is an ordinary run")
    expect_equal(bits(search(programs, folder, *SHORT, "--threads", 1)[0]), bits(result), "one thread")
    nothing, _ = search(programs, folder, "--epochs", 2, "--levels", 1, "--share", 0)
    expect_equal(bits(nothing), [digests(dense)] * 2, "levels that remove nothing")
    everything, _ = search(programs, folder, "--epochs", 1, "--levels", 0, "--unpruned", "none")
    unpruned = everything["levels"][0]["kept"] - rows[0]["kept"]
    published, _ = search(programs, folder, "--epochs", 1, "--levels", 1, "--rule", "reference", "--unpruned", "fc")
    removed = rows[0]["kept"] - published["levels"][1]["kept"]
    expect_equal(removed, math.ceil(0.2 * (rows[0]["kept"] + unpruned)) + 1, "the published count")
    target = rows[0]["parameters"] // 2
    small, _ = search(programs, folder, "--epochs", 1, "--share", 0.3, "--target", target)
    sizes = [row["parameters"] for row in small["levels"]]
    expect(sizes[-1] <= target < sizes[-2], f"the first level of at most {target} parameters: {sizes}")


def resumed(programs, folder):
    """Stops in the dense run to the step of rewinding, at its end, in levels and between them."""
    ranks = 2 if programs.mpirun else 0
    for k, stops in [(0, (10, 2 * STEPS, 2 * STEPS + 14, 6 * STEPS)), (30, (20, 30, 40, 50))]:
        arguments = [*SHORT, "--rewind-step", k]
        whole, _ = search(programs, folder, *arguments, ranks=ranks)
        expect_equal(whole["start"] is None, k == 0, "a dense run to the step of rewinding")
        expect_equal(whole["levels"][2]["steps"], k + 3 * (2 * STEPS - k), "steps in all")
        for stop in stops:
            file = folder / f"tickets-{k}-{stop}"
            kept = [*arguments, "--checkpoint", file, "--checkpoint-every", 7]
            first, _ = search(programs, folder, *kept, "--stop-after", stop, ranks=ranks)
            expect_equal(first["finished"], stop == 6 * STEPS, f"finished after {stop} steps")
            again, _ = search(programs, folder, *kept, "--resume", ranks=ranks)
            expect_equal(bits(again), bits(whole), f"parameters after a stop at step {stop}")
            expect_equal(again["finished"], True, "finished")
            expect(again["processor_seconds"] > 0, "processor time")
    more = ["--epochs", 2, "--levels", 3, *kept[len(SHORT):]]
    further, _ = search(programs, folder, *more, "--resume", ranks=ranks)
    expect_equal(bits(further)[:4], bits(whole), "levels before one more level")
    expect_equal(len(further["levels"]), 4, "one more level")
    if ranks:
        alone, _ = search(programs, folder, *arguments)
        for name in ("kept", "parameters", "bytes", "epochs"):
            expect_equal([row[name] for row in alone["levels"]], [row[name] for row in whole["levels"]], f"{name} on two ranks")


def interrupted(programs, folder):
    run = [*TINY, "--epochs", 20, "--levels", 1, "--threads", 1]
    whole, _ = search(programs, folder, *run[len(TINY):])
    file, result = folder / "signal", folder / "signal.json"
    arguments = [*run, "--checkpoint", file, "--checkpoint-every", 10, "--json", result]
    status, output = programs.signalled(PROGRAM, *arguments, ready=f"{file}.level", number=signal.SIGINT)
    expect_equal(status, 128 + signal.SIGINT, f"exit status: {output}")
    told = load(result)
    expect_equal((told["interrupted"], told["finished"], told["signal"]), (True, False, signal.SIGINT), "the JSON of an interrupted search")
    again, _ = search(programs, folder, *run[len(TINY):], "--checkpoint", file, "--resume")
    expect_equal(bits(again), bits(whole), "parameters after SIGINT")


def saved(programs, folder):
    model, plot = folder / "ticket.safetensors", folder / "tickets.svg"
    result, out = search(programs, folder, *SHORT, "--save", model, "--plot", plot)
    programs.run("predict", "--model", model, TEST_IMAGES, "--labels", TEST_LABELS, "--json", folder / "predicted.json")
    expect_equal(load(folder / "predicted.json")["files"][0]["accuracy"], result["accuracy"], "accuracy of the saved network")
    if shutil.which("gnuplot"):
        picture = plot.read_text(encoding="utf-8")
        expect("by level" in picture and "parameters" in picture, f"a plot of the levels: {out}")


def refused(programs, folder):
    def fails(*arguments, says):
        _, err = programs.run(PROGRAM, *TINY, *arguments, fails=True)
        for part in says:
            expect(part in err, f"{err!r} does not say {part!r}")

    fails(says=["--levels or --target must say where to stop"])
    fails("--target", 100, says=["--target 100:", "parameters are never pruned"])
    fails("--target", 9000, "--share", 0, says=["--share 0 removes nothing"])
    fails("--share", 1.5, "--levels", 1, says=["--share"])
    fails("--levels", 1, "--unpruned", "head", says=["head"])
    fails("--levels", 1, "--epochs", 1, "--rewind-step", 23, says=["--rewind-step 23: a level has 23 steps"])
    fails("--levels", 1, "--mode", "hybrid", says=["--mode"])
    file = folder / "tickets-0-10"
    fails(*SHORT, "--checkpoint", file, says=["exists already", "--resume goes on from it"])
    for option, value in [("--lr", 0.5), ("--share", 0.3), ("--rewind-step", 3)]:
        name = {"--lr": "learning_rate"}.get(option, option[2:].replace("-", "_"))
        fails(*SHORT, "--checkpoint", file, "--resume", option, value, says=[f"made with {name} ", f"this run has {value}"])


def test(programs, folder):
    levels(programs, folder)
    resumed(programs, folder)
    interrupted(programs, folder)
    saved(programs, folder)
    refused(programs, folder)


main(test)
