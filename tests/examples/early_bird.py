#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""early_bird: tickets and their sizes, three criteria, the same bits after a stop in either phase, several ranks, refused
options."""
import math
import signal

from support import TEST_IMAGES, TEST_LABELS, TINY, digests, expect, expect_equal, load, main

PROGRAM = "early_bird"
SOON = ["--epochs", 4, "--masks", 2, "--distance", 1]  # any two masks agree: a ticket after epoch 2
STEPS = 23  # an epoch


def search(programs, folder, *arguments, ranks=0):
    target = folder / "bird.json"
    target.unlink(missing_ok=True)
    out, _ = programs.run(PROGRAM, *TINY, "--json", target, *arguments, ranks=ranks)
    return load(target), out


def sizes(result):
    return [epoch["parameters"] for epoch in result["history"]]


def tickets(programs, folder):
    result, out = search(programs, folder, *SOON, "--share", "0.3,0.5", "--train-share", 0.5)
    expect_equal([one["epoch"] for one in result["shares"]], [2, 2], "epochs of the tickets")
    for one in result["shares"]:
        expect_equal(one["kept_channels"], one["channels"] - math.floor(one["share"] * one["channels"]), "channels")
        expect_equal([at["epoch"] for at in one["distances"]], [1, 2], "distances by epoch")
        expect(one["distances"][0]["distance"] is None and 0 <= one["distances"][1]["distance"] <= 1, "distances")
    expect_equal(result["ticket"], result["shares"][1], "the ticket that is trained on")
    dense, small = result["before"], result["after"]
    expect(small["parameters"] < dense["parameters"] and small["macs"] < dense["macs"], "a smaller network")
    expect_equal(small["parameters"], result["ticket"]["parameters"], "parameters of the ticket")
    expect_equal(sizes(result), [dense["parameters"]] * 2 + [small["parameters"]] * 2, "parameters by epoch")
    expect_equal([epoch["epoch"] for epoch in result["history"]], [1, 2, 3, 4], "epochs")
    expect_equal(result["history"][3]["bytes_per_step"], 4 * small["parameters"], "bytes of a step")
    expect(f"{small['parameters']:,} parameters" in out, f"the size is printed:\n{out}")
    fresh, _ = search(programs, folder, *SOON, "--weights", "reinit")
    expect_equal(sizes(fresh), sizes(result), "sizes with new weights")
    expect(digests(fresh)[:2] == digests(result)[:2] and digests(fresh)[2] != digests(result)[2], "new weights")
    reference, _ = search(programs, folder, *SOON, "--rule", "reference")
    expect_equal(reference["ticket"]["epoch"], 1, "the published program draws before training, too")
    more, _ = search(programs, folder, *SOON, "--channels", "select")
    expect(more["ticket"]["channels"] > result["ticket"]["channels"], "channels that branches read")
    never, out = search(programs, folder, "--epochs", 1)
    expect(never["ticket"] is None and never["finished"] and "no ticket was found" in out, f"too few epochs:\n{out}")
    plain, _ = search(programs, folder, "--epochs", 1, "--scale-sparsity", 0, "--gamma-start", 1)
    ordinary = programs.train(folder, "--mode", "dense", "--epochs", 1)
    expect_equal(digests(plain), digests(ordinary), "a search without sparsity is an ordinary run")


def criteria(programs, folder):
    for criterion in ("slimming", "filter-norms"):
        arguments = ["--epochs", 2, "--criterion", criterion, "--fine-tune-epochs", 2, "--fine-tune-lr", 0.02]
        whole, _ = search(programs, folder, *arguments)
        expect_equal([epoch["epoch"] for epoch in whole["history"]], [1, 2, 3, 4], f"{criterion}: epochs")
        expect_equal((whole["ticket"]["epoch"], whole["ticket"]["distances"]), (2, []), f"{criterion}: the ticket")
        expect(sizes(whole)[1] > sizes(whole)[2] == whole["after"]["parameters"], f"{criterion}: parameters by epoch")
        expect(whole["history"][2]["learning_rate"] <= 0.02, f"{criterion}: the second learning rate")
        for stop in (30, 2 * STEPS, 60):
            file = folder / f"{criterion}-{stop}"
            search(programs, folder, *arguments, "--checkpoint", file, "--stop-after", stop)
            again, _ = search(programs, folder, *arguments, "--checkpoint", file, "--resume")
            expect_equal(digests(again), digests(whole), f"{criterion}: parameters after a stop at step {stop}")
    cut, _ = search(programs, folder, "--epochs", 1, "--criterion", "slimming", "--fine-tune-epochs", 0)
    expect(cut["finished"] and len(cut["history"]) == 1 and 0 <= cut["accuracy"] <= 100, "no epoch after the removal")


def resumed(programs, folder):
    """Stops in the search, at the ticket, in the search for a further ticket, and in the training of the small network."""
    ranks = 2 if programs.mpirun else 0
    for arguments, stops in [(SOON, (10, 2 * STEPS, 60)),
                             (["--epochs", 3, "--masks", 2, "--share", "0.4,0.5", "--distance", "0.3", "--seed", 2], (50, 80, 100))]:
        whole, _ = search(programs, folder, *arguments, ranks=ranks)
        for stop in stops:
            file = folder / f"bird-{len(arguments)}-{stop}"
            kept = [*arguments, "--checkpoint", file, "--checkpoint-every", 7]
            search(programs, folder, *kept, "--stop-after", stop, ranks=ranks)
            again, _ = search(programs, folder, *kept, "--resume", ranks=ranks)
            for name in ("history", "further_search"):
                expect_equal([epoch["digest"] for epoch in again[name]], [epoch["digest"] for epoch in whole[name]],
                             f"parameters after a stop at step {stop}: {name}")
            expect_equal(again["shares"], whole["shares"], f"tickets after a stop at step {stop}")
    further = ["--epochs", 3, "--masks", 2, "--share", "0,0.5", "--distance", 0]
    whole, _ = search(programs, folder, *further)
    expect_equal((whole["ticket"]["epoch"], whole["epochs"]), (2, 3), "a share of nothing has a ticket at once")
    expect_equal(sizes(whole), [whole["before"]["parameters"]] * 3, "and removes nothing")
    if ranks:
        alone, _ = search(programs, folder, *SOON)
        both, _ = search(programs, folder, *SOON, ranks=ranks)
        for name in ("epoch", "channels", "kept_channels"):
            expect_equal(both["ticket"][name], alone["ticket"][name], f"{name} on two ranks")


def interrupted(programs, folder):
    run = [*TINY, "--epochs", 30, "--masks", 2, "--distance", 1, "--threads", 1]
    whole, _ = search(programs, folder, *run[len(TINY):])
    for part in ("", ".train"):
        file, result = folder / f"signal-{len(part)}", folder / "signal.json"
        arguments = [*run, "--checkpoint", file, "--checkpoint-every", 10, "--json", result]
        status, output = programs.signalled(PROGRAM, *arguments, ready=f"{file}{part}", number=signal.SIGINT)
        expect_equal(status, 128 + signal.SIGINT, f"exit status: {output}")
        told = load(result)
        expect_equal((told["interrupted"], told["finished"]), (True, False), "the JSON of an interrupted search")
        again, _ = search(programs, folder, *run[len(TINY):], "--checkpoint", file, "--resume")
        expect_equal(digests(again), digests(whole), "parameters after SIGINT")


def saved(programs, folder):
    for model in ("small-resnet", "small-vgg"):
        file = folder / f"{model}.safetensors"
        result, _ = search(programs, folder, *SOON, "--model", model, "--save", file)
        programs.run("predict", "--model", file, TEST_IMAGES, "--labels", TEST_LABELS, "--json", folder / "predicted.json")
        predicted = load(folder / "predicted.json")
        expect_equal(predicted["files"][0]["accuracy"], result["accuracy"], f"{model}: accuracy of the saved network")
        expect_equal(predicted["parameters"], result["after"]["parameters"], f"{model}: parameters of the saved network")


def refused(programs, folder):
    def fails(*arguments, says):
        _, err = programs.run(PROGRAM, *TINY, *arguments, fails=True)
        for part in says:
            expect(part in err, f"{err!r} does not say {part!r}")

    fails("--share", "0.3,0.3", says=["--share has 0.3 twice"])
    fails("--share", "0.3", "--train-share", 0.5, says=["--train-share 0.5 is none of --share"])
    fails("--share", "1.2", says=["--share"])
    fails("--fine-tune-epochs", 3, says=["have no effect with --criterion early-bird"])
    fails("--criterion", "slimming", "--masks", 3, says=["--masks: has no effect with --criterion slimming"])
    fails("--model", "mlp", says=["mlp: no convolution has a batch norm"])
    fails("--compress", "signum", says=["Signum"])
    file = folder / f"bird-{len(SOON)}-10"
    fails(*SOON, "--checkpoint", file, says=["exists already", "--resume goes on from it"])
    fails(*SOON, "--checkpoint", file, "--resume", "--share", 0.7, says=["made with shares [0.5], this run has [0.7]"])
    fails(*SOON, "--checkpoint", file, "--resume", "--scale-sparsity", 1, says=["sparsity of scales"])
    (folder / f"bird-{len(SOON)}-10.train").unlink()
    fails(*SOON, "--checkpoint", file, "--resume", says=[".train: is missing"])


def test(programs, folder):
    tickets(programs, folder)
    criteria(programs, folder)
    resumed(programs, folder)
    interrupted(programs, folder)
    saved(programs, folder)
    refused(programs, folder)


main(test)
