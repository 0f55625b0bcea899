#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""plan's counts are those of tests/golden/zoo.json, its bytes those of bench/compressor_bytes.py, and its times those of
bench/scaling_model.py on a link where hosts lose no time; budgets are met; weights with statistics give losses. Of an ONNX
model, where Python's onnx and numpy are installed, it counts what the shapes say, and its forms are those of factorize_onnx."""
import json
import math
import pathlib
import sys

from support import expect, expect_equal, load, main
from weights import write

try:
    import numpy
    import onnx
    from onnx import helper, numpy_helper
except ImportError:
    onnx = None

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


# Weights of the ONNX model: shape, and number of places of an image that they are applied to.
WEIGHTS = {"conv1.weight": ((16, 3, 3, 3), 144), "conv2.weight": ((64, 8, 3, 3), 36), "fc1.weight": ((96, 2304), 1),
           "product": ((16, 32), 6), "gates": ((1, 96, 32), 6), "hidden": ((1, 96, 24), 6), "fc2.weight": ((10, 24), 1)}


def write_model(path, image):
    """A model with convolutions, one of them of two groups, linear layers, a product and an LSTM. Returns its parameters."""
    random = numpy.random.default_rng(1)
    constants = [numpy_helper.from_array(random.normal(0, 0.2, shape).astype("float32"), name) for name, (shape, _) in WEIGHTS.items()]
    constants += [numpy_helper.from_array(numpy.zeros(96, "float32"), "fc1.bias"),
                  numpy_helper.from_array(numpy.array([-1, 6, 16]), "rows"), numpy_helper.from_array(numpy.array([0]), "first")]
    nodes = [helper.make_node("Conv", ["image", "conv1.weight"], ["a"], pads=[1, 1, 1, 1]),
             helper.make_node("Relu", ["a"], ["b"]),
             helper.make_node("Conv", ["b", "conv2.weight"], ["c"], group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
             helper.make_node("Flatten", ["c"], ["d"]),
             helper.make_node("Gemm", ["d", "fc1.weight", "fc1.bias"], ["e"], transB=1),
             helper.make_node("Reshape", ["e", "rows"], ["f"]), helper.make_node("MatMul", ["f", "product"], ["g"]),
             helper.make_node("Transpose", ["g"], ["h"], perm=[1, 0, 2]),
             helper.make_node("LSTM", ["h", "gates", "hidden"], ["", "i"], hidden_size=24),
             helper.make_node("Squeeze", ["i", "first"], ["j"]), helper.make_node("Gemm", ["j", "fc2.weight"], ["y"], transB=1)]
    graph = helper.make_graph(nodes, "net", [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, image)],
                              [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [image[0], 10])], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), str(path))
    return 96 + sum(math.prod(shape) for shape, _ in WEIGHTS.values())


def write_statistics(path, gradients):
    """Statistics of 100 rows for all weights that may be factorized."""
    random = numpy.random.default_rng(2)
    tensors = {}
    for name in ("conv2.weight", "fc1.weight", "product", "gates"):
        shape = [extent for extent in WEIGHTS[name][0] if extent > 1]
        outputs, inputs = (shape[1], shape[0]) if name == "product" else (shape[0], math.prod(shape[1:]))
        part, width = ("input", inputs) if name == "gates" else ("output", outputs)
        rows, slopes = random.normal(size=(100, width)) * numpy.geomspace(1, 0.01, width), random.normal(size=(100, outputs))
        counts = [100 * (part == "output"), 100 * (part == "input"), 100 * gradients, 0, 100, 100, 0]
        sums = {f"{part}_moment": rows.T @ rows, f"{part}_sum": rows.sum(0), "counts": numpy.array(counts, "float64")}
        if gradients:
            sums["gradient_moment"] = slopes.T @ slopes
        tensors |= {f"{name}.{key}": ("F64", v.shape, v.tobytes()) for key, v in sums.items()}
        tensors[f"{name}.size"] = ("I64", (2,), numpy.array([outputs, inputs], "int64").tobytes())
    write(path, tensors)


def check_onnx(programs, folder):
    model, report, seen = folder / "net.onnx", folder / "low.json", folder / "onnx_seen.safetensors"
    parameters = write_model(model, ["n", 3, 12, 12])

    def rows(*arguments):
        out, _ = programs.run("plan", "--compressors", "none", "--budgets", 0.6, 0.3, "--json", "-", "--model", *arguments)
        return {network: row for (network, _), row in rows_of(json.loads(out)).items()}

    planned = rows(model)
    macs = sum(math.prod(shape) * places for shape, places in WEIGHTS.values())
    expect_equal((planned["dense"]["parameters"], planned["dense"]["macs"]), (parameters, macs), "parameters and MACs of an ONNX model")
    expect_equal(planned["dense"]["payload_bytes"], 4 * parameters, "bytes of a step")
    expect_equal(sum(size for size, _ in planned["dense"]["buckets"]), 4 * parameters, "bytes of the buckets")
    outputs = 144 * 16 * 2 + 36 * 64 * 2 + 96 * 2 + 6 * 32 * 2 + 24 * 2 + 10
    expect_equal(planned["dense"]["memory_bytes"], 4 * (3 * parameters + 32 * outputs), "memory")
    for name, options in (("hybrid", []), ("budget 0.6", ["--budget", 0.6]), ("budget 0.3", ["--budget", 0.3])):
        programs.run("factorize_onnx", model, folder / "low.onnx", *options, "--overwrite", "--json", report)
        made = load(report)
        want = macs + sum((row["parameters_after"] - row["parameters_before"]) * WEIGHTS[row["name"]][1] for row in made["tensors"])
        expect_equal((planned[name]["parameters"], planned[name]["macs"]), (made["parameters_after"], want), f"{name} by factorize_onnx")
    check_advice(json.loads(programs.run("plan", "--model", model, "--json", "-")[0]))

    # The batch of the file, and extents that only the user knows.
    write_model(folder / "four.onnx", [4, 3, 12, 12])
    expect_equal(rows(folder / "four.onnx"), planned, "a model of four images")
    write_model(folder / "free.onnx", ["n", 3, "height", "width"])
    expect_equal(rows(folder / "free.onnx", "--input-shape", "image=2x3x12x12"), planned, "a model of any image")

    for gradients in (False, True):
        write_statistics(seen, gradients)
        told = rows(model, "--statistics", seen)
        kept, losses = ([told[f"budget {share}"][key] for share in ("0.6", "0.3")] for key in ("outputs_kept", "predicted_loss"))
        expect(1 > kept[0] > kept[1] > 0, f"outputs kept: {kept}")
        expect(0 < losses[0] < losses[1] if gradients else losses == [None, None], f"losses: {losses}")
        text, _ = programs.run("plan", "--model", model, "--statistics", seen)
        expect(("predicted loss" if gradients else "least of outputs") in text, text)

    for arguments, problem in [((folder / "free.onnx",), "no fixed extent 2"), (("/nowhere.onnx",), "/nowhere.onnx"),
                               ((model, "--input-shape", "image=1x3"), "has 4 extents"), ((report.rename(folder / "x.onnx"),), "no ONNX"),
                               ((model, "--input-shape", "x=1x3"), "the inputs 'image'"), ((model, "--input-shape", "x=1x"), "not NAME="),
                               ((model, "--weights", "x"), "--weights"), ((model, "--width", 8), "--width")]:
        _, refused = programs.run("plan", "--model", *arguments, fails=True)
        expect(problem in refused and len(refused.splitlines()) == 1, f"{arguments}: {refused}")


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
    if onnx is None or not (programs.folder / "factorize_onnx").exists():
        print("ONNX models are not tried: they need Python's onnx and numpy, and the adapter")
    else:
        check_onnx(programs, folder)
    for arguments, problem in [(["--budgets", 0.001], "--budgets: rank 1"), (["--model", "resnet"], "--model"),
                               (["--statistics", "x"], "needs --weights"), (["--weights", "/nowhere"], "/nowhere")]:
        _, refused = programs.run("plan", *arguments, fails=True)
        expect(problem in refused and len(refused.splitlines()) == 1, f"{arguments}: {refused}")


main(test)
