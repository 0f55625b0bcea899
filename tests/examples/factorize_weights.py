#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""factorize_weights: a file with ResNet-50's names and shapes to factors and back, small files of other kinds, bad
input; and run_weights against PyTorch, where there is PyTorch."""
import array
import json
import math
import os
import pathlib
import resource
import struct
import subprocess
import sys
import time
import zipfile

from support import TEST_IMAGES, TEST_LABELS, expect, expect_equal, load, main
from weights import SIZE, Values, read, resnet50, write

HERE = pathlib.Path(__file__).resolve().parent


def floats(tensor):
    dtype, _, data = tensor
    return array.array({"F32": "f", "F64": "d"}[dtype], data)


def relative_distance(a, b):
    """||a - b|| / ||a||, of a few million elements at most."""
    a, b = floats(a), floats(b)
    expect_equal(len(a), len(b), "elements")
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a))


def check_factors(dense, low, rows):
    """Names, shapes and dtypes of the factorized file; what stays is the same to the bit."""
    expected = {}
    biases = {row["name"][: -len("weight")] + "bias" for row in rows if row["factorized"]}
    for row in rows:
        name = row["name"]
        dtype, shape, data = dense[name]
        if row["factorized"]:
            stem, r = name[: -len(".weight")], row["rank"]
            ones = (1,) * (len(shape) - 2)
            expected[f"{stem}.down.weight"] = (dtype, (r, *shape[1:]), None)
            expected[f"{stem}.up.weight"] = (dtype, (shape[0], r, *ones), None)
        else:
            expected[f"{name[:-len('bias')]}up.bias" if name in biases else name] = (dtype, shape, data)
    expect_equal(sorted(low), sorted(expected), "names of the factorized file")
    for name, (dtype, shape, data) in expected.items():
        expect_equal(low[name][:2], (dtype, shape), name)
        expect(data is None or low[name][2] == data, f"{name} has changed")


def resnet(programs, folder):
    entries = resnet50()
    expect_equal((len(entries), sum(math.prod(s) for _, d, s in entries if d == "F32")), (320, 25610152), "ResNet-50")
    dense_file, low_file, merged_file = (folder / f"{n}.safetensors" for n in ("dense", "low", "merged"))
    # By a process of its own: a child's peak memory starts with what its parent has.
    subprocess.run([sys.executable, str(HERE / "weights.py"), str(dense_file)], check=True)
    size = dense_file.stat().st_size

    start = time.monotonic()
    process = subprocess.Popen(programs.command("factorize_weights", dense_file, low_file, "--rank-ratio", 0.25, "--json",
                                                folder / "low.json"), stdout=subprocess.PIPE, text=True)
    table = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    expect_equal(status, 0, "exit status")
    # Of whatever machine this is: shown, not judged.
    print(f"ResNet-50: {time.monotonic() - start:.1f} s, peak memory {usage.ru_maxrss / 1024:.0f} MB = "
          f"{1024 * usage.ru_maxrss / size:.2f} of the file's {size / 2**20:.0f} MB")
    dense, _ = read(dense_file)
    rows = load(folder / "low.json")["tensors"]
    expect_equal([row["name"] for row in rows], [n for n, _, _ in sorted(entries, key=lambda e: (-SIZE[e[1]], e[0]))],
                 "the report has every tensor, as in the file")
    low, metadata = read(low_file)
    check_factors(dense, low, rows)
    by_name = {row["name"]: row for row in rows}
    expect_equal(by_name["conv1.weight"]["reason"], "the first layer", "conv1")
    expect_equal(by_name["fc.weight"]["reason"], "the last layer", "fc")
    expect_equal(by_name["layer4.2.conv2.weight"]["rank"], 128, "rank of 512 x 4608")
    expect_equal(sum(row["factorized"] for row in rows), 52, "factorized layers")
    expect("layer4.2.conv2.weight" in table and "52 weights factorized" in table, f"the table:\n{table}")
    expect_equal(metadata["format"], "pt", "metadata of the input")
    expect_equal(json.loads(metadata["pufferfish.low_rank"])["layer4.2.conv2.weight"], 128, "metadata")

    programs.run("factorize_weights", low_file, merged_file, "--merge")
    merged, metadata = read(merged_file)
    expect_equal({n: t[:2] for n, t in merged.items()}, {n: t[:2] for n, t in dense.items()}, "merged shapes")
    expect_equal(metadata, {"format": "pt"}, "merged metadata")
    for name, row in by_name.items():
        if not row["factorized"]:
            expect(merged[name][2] == dense[name][2], f"{name} has changed")
        elif row["parameters_before"] < 300000:
            error = relative_distance(dense[name], merged[name])
            expect(abs(error - row["relative_error"]) < 1e-4, f"{name}: {error}, reported {row['relative_error']}")
    return dense_file, low_file, merged_file


def against_torch(programs, folder, files):
    """Logits of ResNet-50, dense and with factors, here and in PyTorch as two layers each."""
    probe = subprocess.run([sys.executable, str(HERE / "torch_resnet50.py"), "-", "-", "-"], capture_output=True, text=True,
                           check=False)
    if probe.returncode == 77:
        print(f"skipped, the comparison with PyTorch: {probe.stderr.strip()}")
        return
    values = Values(seed=2, length=100003)
    images = folder / "images.safetensors"
    write(images, {"images": ("F32", (2, 64, 64, 3), values.take(2 * 64 * 64 * 3))})
    for file in files:
        ours, theirs = folder / "ours.safetensors", folder / "theirs.safetensors"
        programs.run("run_weights", "--model", "resnet50", file, images, ours)
        result = subprocess.run([sys.executable, str(HERE / "torch_resnet50.py"), str(file), str(images), str(theirs)],
                                capture_output=True, text=True, check=False)
        expect_equal(result.returncode, 0, f"PyTorch with {file.name}: {result.stderr}")
        tensors = [read(path)[0]["logits"] for path in (ours, theirs)]
        expect_equal([t[:2] for t in tensors], [("F32", (2, 1000))] * 2, "logits")
        logits = [floats(t) for t in tensors]
        largest = max(abs(v) for v in logits[1])
        distance = max(abs(a - b) for a, b in zip(*logits))
        print(f"{file.name}: logits up to {largest:.3f}, PyTorch's differ by up to {distance:.1e}")
        expect(0.05 < largest < 1e3 and distance <= 1e-4 * max(1.0, largest), f"{file.name}: PyTorch's differ by {distance}")


def small_files(programs, folder):
    """A language model's names, other dtypes, other policies."""
    values = Values(seed=3, length=10007)
    tensors = {}
    for name, shape in [("encoder.weight", (500, 40)), ("rnn.weight_ih_l0", (160, 40)), ("rnn.weight_hh_l0", (160, 40)),
                        ("rnn.weight_ih_l1", (160, 40)), ("rnn.weight_hh_l1", (160, 40)), ("rnn.bias_ih_l0", (160,)),
                        ("embed_tokens.weight", (500, 40)), ("mlp.weight", (96, 80)), ("mlp.bias", (96,)),
                        ("decoder.weight", (500, 40)), ("decoder.bias", (500,))]:
        tensors[name] = ("F64" if name.startswith("mlp") else "F32", shape,
                         values.take(math.prod(shape)) * (2 if name.startswith("mlp") else 1))
    # Doubles from the bytes of floats may be no numbers.
    tensors["mlp.weight"] = ("F64", (96, 80), array.array("d", array.array("f", values.take(96 * 80))).tobytes())
    tensors["half.weight"] = ("F16", (64, 64), struct.pack("<4096e", *array.array("f", values.take(4096))))
    tensors["brain.weight"] = ("BF16", (64, 64), b"".join(values.take(1)[2:] for _ in range(4096)))
    dense = folder / "small.safetensors"
    write(dense, tensors)
    out, _ = programs.run("factorize_weights", dense, folder / "a", "--rank-ratio", 0.25, "--keep-first", 0,
                          "--factorize-last", "--all", "--json", "-")
    rows = {row["name"]: row for row in json.loads(out)["tensors"]}
    expect_equal((rows["rnn.weight_ih_l0"]["rank"], rows["rnn.weight_ih_l0"]["matrices"]), (10, 4), "gates")
    expect_equal(rows["embed_tokens.weight"]["reason"], "an embedding", "embedding")
    expect_equal(rows["decoder.weight"]["factorized"], True, "the last layer")
    low, _ = read(folder / "a")
    expect_equal(low["rnn.weight_ih_l0.down"][:2], ("F32", (40, 40)), "first factors of four gates")
    expect_equal(low["rnn.weight_ih_l0.up"][:2], ("F32", (160, 10)), "second factors of four gates")
    expect_equal(low["decoder.up.bias"], tensors["decoder.bias"], "bias")
    expect_equal([low[f"{n}.up.weight"][:2] for n in ("mlp", "half", "brain")],
                 [("F64", (96, 20)), ("F16", (64, 16)), ("BF16", (64, 16))], "dtypes")
    programs.run("factorize_weights", folder / "a", folder / "b", "--merge")
    back, _ = read(folder / "b")
    for name in ("mlp.weight", "rnn.weight_hh_l1", "decoder.weight"):
        error = relative_distance(tensors[name], back[name])
        expect(abs(error - rows[name]["relative_error"]) < 1e-5, f"{name}: {error}, not {rows[name]['relative_error']}")

    # A budget is kept, and the whole of the energy takes every rank.
    total = sum(math.prod(t[1]) for t in tensors.values())
    programs.run("factorize_weights", dense, folder / "c", "--budget", total * 7 // 10, "--json", folder / "c.json")
    expect(0.65 * total < load(folder / "c.json")["parameters_after"] <= 0.7 * total, "budget")
    programs.run("factorize_weights", dense, folder / "d", "--energy", 0.6, "--include", "rnn|mlp", "--exclude", "_l1",
                 "--json", folder / "d.json")
    rows = {row["name"]: row for row in load(folder / "d.json")["tensors"]}
    expect_equal(sorted(n for n, row in rows.items() if row["factorized"]),
                 ["mlp.weight", "rnn.weight_hh_l0", "rnn.weight_ih_l0"], "chosen by name")
    for name in ("mlp.weight", "rnn.weight_ih_l0"):
        expect(0.6 <= rows[name]["energy_kept"] < 0.75, f"{name} keeps {rows[name]['energy_kept']}")
    return dense


def python(script, *arguments):
    """Runs a script that exits with 77 without PyTorch."""
    result = subprocess.run([sys.executable, str(HERE / script), *map(str, arguments)], capture_output=True, text=True,
                            check=False)
    if result.returncode != 77:
        print(result.stdout, end="")
        expect_equal(result.returncode, 0, f"{script} {arguments}: {result.stdout}{result.stderr}")
    return result


def torch_modules(programs, folder):
    """Grouped convolutions, embeddings and attention: the factors in PyTorch's modules compute what their product does."""
    dense, low, merged = (folder / f"modules-{n}.safetensors" for n in ("dense", "low", "merged"))
    made = python("torch_factors.py", "make", dense)
    if made.returncode == 77:
        print(f"skipped, the modules of PyTorch: {made.stderr.strip()}")
        return
    programs.run("factorize_weights", dense, low, "--keep-first", 0, "--factorize-last", "--factorize-embeddings",
                 "--embedding-names", "table", "--embedding-rank", 6, "--factorize-projections", "--groups", "conv.weight=4",
                 "--groups", "depthwise.weight=32", "--json", folder / "modules.json")
    rows = {row["name"]: row for row in load(folder / "modules.json")["tensors"]}
    expect_equal((rows["conv.weight"]["rank"], rows["conv.weight"]["matrices"]), (3, 4), "groups")
    expect_equal((rows["table.weight"]["rank"], rows["table.weight"]["embedding"]), (6, True), "embedding")
    expect_equal(rows["attention.in_proj_weight"]["matrices"], 3, "projections")
    expect_equal(rows["depthwise.weight"]["reason"], "depthwise, or of one channel", "depthwise")
    programs.run("factorize_weights", low, merged, "--merge")
    python("torch_factors.py", "check", low, merged)


def torch_statistics(programs, folder):
    """Statistics taken in PyTorch: predicted losses are those of the factors, and least with two-sided ones."""
    dense, seen, low, merged, report = (folder / f"seen-{n}" for n in ("dense", "statistics", "low", "merged", "json"))
    made = python("torch_statistics.py", "make", dense, seen)
    if made.returncode == 77:
        print(f"skipped, statistics taken in PyTorch: {made.stderr.strip()}")
        return
    losses = {}
    chosen = ["--statistics", seen, "--include", "conv|linear|wte", "--keep-first", 0, "--factorize-last", "--groups",
              "conv.weight=2", "--overwrite"]
    for kind in ("plain", "data-aware", "two-sided"):
        table, _ = programs.run("factorize_weights", dense, low, *chosen, "--truncation", kind, "--json", report)
        expect("predicted loss" in table, f"the table:\n{table}")
        programs.run("factorize_weights", low, merged, "--merge", "--overwrite")
        python("torch_statistics.py", "check", merged, report)
        losses[kind] = sum(row.get("predicted_loss", 0) for row in load(report)["tensors"])
    expect(losses["two-sided"] < min(losses["plain"], losses["data-aware"]), f"two-sided factors lose least: {losses}")
    programs.run("factorize_weights", dense, low, *chosen, "--budget", 5500, "--json", report)
    rows = load(report)
    expect(5000 < rows["parameters_after"] <= 5500, f"a budget of 5500: {rows['parameters_after']}")


def trained_network(programs, folder):
    """Train, factorize, predict: with statistics, the same number of parameters loses less."""
    dense, seen, low, out = (folder / f"digits-{n}" for n in ("dense", "statistics", "low", "json"))
    programs.run("train_image_classifier", "--model", "small-resnet", "--width", 12, "--epochs", 3, "--batch", 64, "--mode",
                 "dense", "--save", dense, "--save-statistics", seen, "--progress", "none")

    def accuracy(file):
        programs.run("predict", "--model", file, TEST_IMAGES, "--labels", TEST_LABELS, "--json", out)
        return load(out)["files"][0]["accuracy"]

    accuracies = {"dense": accuracy(dense)}
    for kind, options in (("plain", []), ("data-aware", ["--truncation", "data-aware"])):
        options += ["--statistics", seen] if options else []
        programs.run("factorize_weights", dense, low, "--budget", 13000, *options, "--overwrite", "--json", out)
        expect(12000 < load(out)["parameters_after"] <= 13000, "the budget")
        accuracies[kind] = accuracy(low)
    print(f"accuracies of the digits: {accuracies}")
    expect(accuracies["data-aware"] > accuracies["plain"] and accuracies["data-aware"] > 0.8 * accuracies["dense"],
           f"accuracies {accuracies}")
    programs.run("factorize_weights", low, folder / "digits-merged", "--merge")
    expect(abs(accuracy(folder / "digits-merged") - accuracies["data-aware"]) < 1, "merged factors predict the same")


def bad_input(programs, folder, dense):
    def refused(*arguments, says):
        _, err = programs.run("factorize_weights", *arguments, fails=True)
        expect(len(err.splitlines()) == 1 and says in err, f"{says!r} in one line, not\n{err}")

    out = folder / "out"
    whole = dense.read_bytes()
    bad = folder / "bad.safetensors"
    for data, says in [(b"", "0 bytes are too few"), (whole[:-1], "not within the data"), (whole + b"\0", "bytes of data"),
                       (b"\xff" * 8 + whole[8:], "header of 18446744073709551615 bytes"),
                       (whole[:8] + b"[" + whole[9:], "not a JSON object"),
                       (whole.replace(b'"F64"', b'"F65"', 1), "unknown dtype 'F65'"),
                       (whole.replace(b'"mlp.bias"', b'"rnn.bias"', 1), None),
                       (struct.pack("<Q", 2) + b"{}", None)]:
        bad.write_bytes(data)
        if says is None:
            programs.run("factorize_weights", bad, folder / "fine", "--overwrite")
        else:
            refused(bad, out, says=says)
            refused(bad, out, "--merge", says=says)
    npz = folder / "dense.npz"
    with zipfile.ZipFile(npz, "w") as archive:
        archive.writestr("mlp.weight.npy", b"")
    refused(npz, out, says="safetensors.numpy.save_file({n: a.copy() for n, a in numpy.load(FILE).items()},")
    nan = dict(read(dense)[0])
    nan["mlp.weight"] = ("F64", (96, 80), b"\xff" * (96 * 80 * 8))
    write(bad, nan)
    refused(bad, out, says="mlp.weight: svd: element (0, 0)")
    refused(dense, out, "--budget", 10, says="the smallest possible budget is")
    refused(dense, out, "--rank-ratio", 0.5, "--energy", 0.5, says="--energy")
    refused(dense, out, "--merge", "--energy", 0.5, says="--merge")
    refused(dense, out, "--rank-ratio", 0, says="0")
    refused(dense, out, "--include", "(", says="--include (")
    refused(dense, out, "--embedding-names", "(", says="--embedding-names (")
    refused(dense, out, "--embedding-rank", 4, says="--factorize-embeddings")
    refused(dense, out, "--factorize-embeddings", "--embedding-rank", 4, "--budget", 10**6, says="--budget")
    refused(dense, out, "--merge", "--groups", "mlp.weight=2", says="--groups")
    refused(dense, out, "--groups", "mlp.weight", says="not NAME=N")
    refused(dense, out, "--groups", "mlp.weight=2x", says="not NAME=N")
    refused(dense, out, "--truncation", "two-sided", says="needs statistics")
    refused(dense, out, "--statistics", dense, says="with the size of its weight")
    refused(dense, out, "--statistics", folder / "none", says="No such file")
    refused(dense, out, "--merge", "--statistics", dense, says="--statistics")
    refused(dense, out, "--groups", "mlp.weight=0", says="not NAME=N")
    refused(dense, out, "--groups", "mlp.weigh=2", says="has no tensor of this name")
    refused(dense, out, "--groups", "mlp.weight=2", says="this tensor has 2 dimensions")
    convolution = folder / "convolution.safetensors"
    write(convolution, {"c.weight": ("F32", (16, 8, 3, 3), bytes(4 * 16 * 72))})
    refused(convolution, out, "--groups", "c.weight=3", says="c.weight: 16 output channels cannot be divided into 3 groups")
    refused(convolution, out, "--groups", "c.weight=2", "--groups", "c.weight=4", says="a number of groups already")
    refused(dense, folder / "none" / "x", says="No such file")
    refused(folder / "none", out, says="No such file")
    refused(dense, says="output is required")
    expect(not out.exists(), "a failed run left a file")
    # Weights that exist are kept: those of another run, and the input itself.
    before = dense.read_bytes()
    refused(dense, dense, says=f"{dense}: exists already; --overwrite replaces it")
    refused(folder / "a", dense, "--merge", says="--overwrite replaces it")
    expect_equal(dense.read_bytes(), before, "the input after a refusal")
    copy = folder / "copy.safetensors"
    copy.write_bytes(before)
    programs.run("factorize_weights", copy, copy, "--rank-ratio", 0.25, "--overwrite")
    expect(len(copy.read_bytes()) < len(before), "--overwrite replaces the input by its factors")


def test(programs, folder):
    dense = small_files(programs, folder)
    torch_modules(programs, folder)
    torch_statistics(programs, folder)
    trained_network(programs, folder)
    bad_input(programs, folder, dense)
    against_torch(programs, folder, resnet(programs, folder)[:2])


main(test)
