#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Bad input ends every example with one line that says what is wrong and exit status 1, or 2 where the options are wrong,
and all ranks of a job with it."""
import gzip
import os

from support import DIGITS, TINY, TEST_IMAGES, expect, main


def refused(programs, name, *arguments, says, ranks=0):
    _, err = programs.run(name, *arguments, ranks=ranks, fails=True)
    ours = [line for line in err.splitlines() if line.startswith(name + ":")]
    expect(len(ours) == 1 and (ranks or len(err.splitlines()) == 1), f"one line, not\n{err}")
    for part in [says] if isinstance(says, str) else says:
        expect(part in ours[0], f"{ours[0]!r} does not say {part!r}")


def damaged_data(folder, name, change):
    """The digits with one file changed."""
    copy = folder / name.replace(".", "-")
    copy.mkdir(exist_ok=True)
    for file in DIGITS.glob("*.gz"):
        data = gzip.decompress(file.read_bytes())
        (copy / file.stem).write_bytes(change(data) if file.stem == name else data)
    return copy


def test(programs, folder):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    train = "train_image_classifier"
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    for arguments, says in [
        (["--mode", "sparse"], "sparse not in {dense,hybrid,lowrank}"),
        (["--dataset", "digit"], "digit not in"),
        (["--model", "resnet"], "resnet not in"),
        (["--model", "resnet34"], "resnet34 has a width of its own, 8 was given"),
        (["--lr", "-1"], "-1 is not a positive number"),
        (["--lr", "nan"], "nan is not a positive number"),
        (["--epochs", "0"], "--epochs"),
        (["--resume"], "requires --checkpoint"),
        (["--merge"], "requires --save"),
        (["--unknown"], "--unknown"),
        (["--dataset", "mnist"], "mnist is not bundled"),
        (["--data", "/nowhere"], "/nowhere: no digits here"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["--plot", "curves.pdf"], ["curves.pdf", ".svg or .png"]),
        (["--save", "/nowhere/x"], "/nowhere/x"),
        (["--save", "/dev/full"], "/dev/full: cannot replace what is not a regular file"),
        (["--first-layer", "50"], ["first_layer 50", "it has 8 with a weight matrix"]),
        (["--epochs", "3", "--warmup-epochs", "3"], "a warm-up of 3 epochs leaves none of 3"),
        (["--epochs", "3", "--warmup-epochs", "2", "--restart-rate"], "is longer than the schedule of 1"),
        (["--schedule", "multistep", "--milestones", "5,2"], "milestone 2 does not follow 5"),
        (["--policy", "best"], "best not in"),
        (["--budget", "1.5"], "--budget"),
        (["--budget", "0.01"], ["fraction 0.01 cannot be met", "the least that can be reached is"]),
        (["--frobenius-decay", "-1"], "-1 is not a number from 0 on"),
        (["--milestones", "5"], ["--milestones: has no effect with --schedule cosine", "only with --schedule multistep"]),
        (["--model", "mlp", "--stem-stride", "2"], "--stem-stride: has no effect with --model mlp"),
        (["--model", "mlp", "--no-batch-norm"],
         ["--no-batch-norm: has no effect with --model mlp", "only with --model small-resnet or small-vgg"]),
        (["--reflect"], "--reflect requires --pad-crop"),
        (["--device", "gpu"], "--device gpu, but"),  # there is none, or it was built without CUDA
        (["--precision", "tf32"], "--precision tf32 needs --device gpu"),
    ]:
        refused(programs, train, *TINY, *arguments, says=says)
    for file, change, says in [
        (images, lambda d: d[:-1], ["needs 91968 values", "has 91967"]),
        (images, lambda d: d + b"\0", "has 91969"),
        (images, lambda d: b"\x1f" + d[1:], "not an IDX file"),
        (images, lambda d: d[:4] + b"\xff" * 12 + d[16:], "shape"),
        (labels, lambda d: d[:8] + b"\x0a" + d[9:], ["label 0 is 10", "0..9"]),
        (labels, lambda d: d[:4] + b"\0\0\0\1" + d[8:9], ["1 labels for 1437 images"]),
        (images, lambda d: b"", "0 bytes are too few"),
    ]:
        refused(programs, train, *TINY, "--data", damaged_data(folder, file, change), says=says)
    if programs.mpirun:
        refused(programs, train, *TINY, "--data", "/nowhere", says="/nowhere: no digits here", ranks=2)
        refused(programs, train, *TINY, "--mode", "sparse", says="sparse not in", ranks=2)

    checkpoints(programs, folder, train)
    models(programs, folder)


def checkpoints(programs, folder, train):
    file = folder / "run.safetensors"
    base = [*TINY, "--epochs", "2", "--warmup-epochs", "1", "--checkpoint", file]
    programs.run(train, *base)
    whole = file.read_bytes()
    refused(programs, train, *base, "--resume", "--seed", "2", says=["seed 1", "seed 2"])
    refused(programs, train, *base, "--resume", "--lr", "0.5", says="learning rate 0.5")
    for option, values in [("--stem-stride", (1, 2)), ("--rank-ratio", (0.25, 0.5)), ("--first-layer", (2, 3))]:
        refused(programs, train, *base, "--resume", option, values[1], says=[f"{values[0]}", f"{values[1]}"])
    other = damaged_data(folder, "train-labels-idx1-ubyte", lambda d: d[:8] + b"\1\2\3\4" + d[12:])
    refused(programs, train, *base, "--resume", "--data", other, says=["training data 1437 images", "digest"])
    # A checkpoint that exists is neither begun anew nor overwritten unless the user says so.
    refused(programs, train, *base, says=[f"{file}: exists already", "--resume goes on from it", "--overwrite"])
    refused(programs, train, *base[:-2], "--save", file, says=[f"{file}: exists already", "--overwrite"])
    if programs.mpirun:
        refused(programs, train, *base, says="--overwrite", ranks=2)
    if file.read_bytes() != whole:
        raise SystemExit("a refused run has changed the checkpoint")
    programs.run(train, *base, "--overwrite")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(programs, train, *base, "--resume", says=str(file))
    file.write_bytes(whole[:8] + b"?" + whole[9:])
    refused(programs, train, *base, "--resume", says=str(file))
    file.write_bytes(b"")
    refused(programs, train, *base, "--resume", says=[str(file), "0 bytes are too few"])
    if programs.mpirun:
        refused(programs, train, *base, "--resume", says=str(file), ranks=2)


def models(programs, folder):
    model = folder / "model.safetensors"
    programs.run("train_image_classifier", *TINY, "--mode", "dense", "--epochs", "1", "--save", model)
    small = folder / "small.pgm"
    small.write_bytes(b"P5 4 4 255\n" + bytes(16))
    short = folder / "short.pgm"
    short.write_bytes(b"P5 8 8 255\n" + bytes(63))
    deep = folder / "deep.pgm"
    deep.write_bytes(b"P5 8 8 65535\n" + bytes(128))
    empty = folder / "empty"
    empty.write_bytes(b"")
    colour = folder / "colour.ppm"
    colour.write_bytes(b"P6 8 8 255\n" + bytes(192))
    for file, says in [
        (small, ["4 x 4 x 1", "8 x 8 x 1"]),
        (short, ["need 64 values", "has 63"]),
        (deep, "65535"),
        (colour, ["8 x 8 x 3", "8 x 8 x 1"]),
        (empty, "neither IDX"),
        (folder / "nothing.pgm", "No such file"),
        (folder, "directory"),
    ]:
        refused(programs, "predict", "--model", model, file, says=says)
    refused(programs, "predict", "--model", small, small, says=str(small))
    refused(programs, "predict", "--model", folder / "run.safetensors", small, says="run.safetensors")
    refused(programs, "predict", "--model", model, TEST_IMAGES, "--labels", TEST_IMAGES, says="labels need 1 dimension")
    refused(programs, "predict", "--model", model, says="files is required")
    # The card says another network than the tensors are of.
    text = model.read_bytes()
    at = text.index(b'\\"width\\":8')
    model.write_bytes(text[: at + 10] + b"9" + text[at + 11 :])
    refused(programs, "predict", "--model", model, small, says=str(model))


main(test)
