#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Files of the Python package safetensors are read by factorize_weights, and its files by the package: every dtype that
is factorized, and those that only pass through. Skips where the package (PyPI: safetensors) or PyTorch is missing; looks
for them in this Python and in the one that $PUFFERFISH_NEW_TORCH names.
"""
import os
import sys

OTHER = os.environ.pop("PUFFERFISH_NEW_TORCH", "")  # tried once
try:
    import numpy
    import safetensors.numpy
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError as error:
    if OTHER:
        os.execv(OTHER, [OTHER, *sys.argv])
    print(f"there is no package safetensors, or no PyTorch: {error}", file=sys.stderr)
    sys.exit(77)

import json
import re

from support import expect, expect_equal, main

# Of W and of up down, relative to W: what storing the factors in so few bits costs.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def low_rank(rows, columns, rank, dtype):
    product = torch.randn(rows, rank, dtype=torch.float64) @ torch.randn(rank, columns, dtype=torch.float64)
    return (product / rank**0.5).to(dtype)


def relative_distance(a, b):
    return ((a.double() - b.double()).norm() / a.double().norm()).item()


def every_dtype(programs, folder):
    torch.manual_seed(1)
    dense = {"embedding.weight": torch.randn(30, 16), "steps": torch.tensor(7), "mask": torch.tensor([True, False, True])}
    for dtype in TOLERANCE:
        dense[f"{dtype}.weight"] = low_rank(48, 40, 4, dtype)
        dense[f"{dtype}.bias"] = torch.randn(48).to(dtype)
    dense_file, low_file, merged_file = (folder / f"{n}.safetensors" for n in ("dense", "low", "merged"))
    save_file(dense, dense_file, metadata={"format": "pt"})
    out, _ = programs.run("factorize_weights", dense_file, low_file, "--rank-ratio", "0.1", "--keep-first", "0", "--factorize-last", "--json", "-")
    report = {row["name"]: row for row in json.loads(out)["tensors"]}
    low = load_file(low_file)
    with safe_open(low_file, "pt") as file:
        expect_equal(file.metadata()["format"], "pt", "metadata")
    for dtype, tolerance in TOLERANCE.items():
        expect(report[f"{dtype}.weight"]["factorized"], f"{dtype} was not factorized")
        down, up = low[f"{dtype}.down.weight"], low[f"{dtype}.up.weight"]
        expect_equal((down.shape, up.shape, down.dtype, up.dtype), ((4, 40), (48, 4), dtype, dtype), f"factors of {dtype}")
        distance = relative_distance(dense[f"{dtype}.weight"], up.double() @ down.double())
        expect(distance <= tolerance, f"{dtype}: the factors' product is {distance} away")
        expect(torch.equal(low[f"{dtype}.up.bias"], dense[f"{dtype}.bias"]), f"{dtype}: the bias has changed")
    for name in ("steps", "mask"):
        expect(torch.equal(low[name], dense[name]), f"{name} has changed")

    programs.run("factorize_weights", low_file, merged_file, "--merge")
    merged = load_file(merged_file)
    expect_equal(sorted(merged), sorted(dense), "names after merging")
    for name, tensor in dense.items():
        expect_equal((merged[name].shape, merged[name].dtype), (tensor.shape, tensor.dtype), name)
        if tensor.is_floating_point():
            distance = relative_distance(tensor, merged[name])
            expect(distance <= 2 * TOLERANCE[tensor.dtype], f"{name}: {distance} away after merging")


def converted_archive(programs, folder):
    """The error for an .npz file has a line of Python that converts the file, whatever the order of its elements."""
    archive, converted, low = (folder / f"archive.{n}" for n in ("npz", "safetensors", "low"))
    weight = numpy.random.default_rng(1).standard_normal((48, 40)).astype("f4")
    arrays = {"a.weight": weight, "b.weight": numpy.asfortranarray(weight), "c.weight": weight.astype(">f4")}
    numpy.savez(archive, **arrays)
    _, error = programs.run("factorize_weights", archive, low, fails=True)
    line = re.search(r"in Python, (.*) converts it", error)[1].replace('"FILE.safetensors"', repr(str(converted)))
    eval(line, {"numpy": numpy, "safetensors": safetensors, "FILE": str(archive)})
    for name, tensor in load_file(converted).items():
        expect(numpy.array_equal(tensor.numpy(), weight), f"{name} has changed")
    programs.run("factorize_weights", converted, low)


def trained_network(programs, folder):
    """What train_image_classifier saves is what PyTorch's modules of the same names take."""
    model = folder / "digits.safetensors"
    programs.train(folder, "--epochs", "2", "--warmup-epochs", "1", "--save", model)
    state = load_file(model)
    expect(all(t.isfinite().all() for t in state.values() if t.is_floating_point()), "a weight is not finite")
    pairs = [name[: -len(".down.weight")] for name in state if name.endswith(".down.weight")]
    expect(pairs, "nothing was factorized")
    for name in pairs:
        down, up = state[f"{name}.down.weight"], state[f"{name}.up.weight"]
        expect_equal(down.shape[0], up.shape[1], f"rank of {name}")


def test(programs, folder):
    every_dtype(programs, folder)
    converted_archive(programs, folder)
    trained_network(programs, folder)


main(test)
