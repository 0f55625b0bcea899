#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""factorize_onnx on a network that Python's onnx writes: ranks, budgets, reasons, bad input; statistics that ONNX Runtime
measures, where it is installed. Exits with 77 without Python's onnx and numpy."""
import sys

try:
    import numpy
    import onnx
    from onnx import helper, numpy_helper
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
try:
    import onnxruntime
except ImportError:
    onnxruntime = None

from support import expect, expect_equal, load, main
from weights import write

FLOAT = onnx.TensorProto.FLOAT


def network(path):
    """Two convolutions, one of them grouped, and two linear layers, whose outputs span few directions."""
    random = numpy.random.default_rng(1)

    def weight(name, *shape):
        return numpy_helper.from_array(random.normal(0, 0.2, shape).astype("float32"), name)

    constants = [weight("conv1.weight", 16, 3, 3, 3), weight("conv1.bias", 16), weight("conv2.weight", 64, 8, 3, 3),
                 weight("fc1.weight", 96, 64), weight("fc1.bias", 96), weight("fc2.weight", 10, 96), weight("scale", 96)]
    nodes = [helper.make_node("Conv", ["x", "conv1.weight", "conv1.bias"], ["a"], "conv1", pads=[1, 1, 1, 1]),
             helper.make_node("Relu", ["a"], ["b"], "relu1"),
             helper.make_node("Conv", ["b", "conv2.weight"], ["c"], "conv2", group=2, strides=[2, 2]),
             helper.make_node("GlobalAveragePool", ["c"], ["d"], "pool"),
             helper.make_node("Flatten", ["d"], ["e"], "flatten"),
             helper.make_node("Gemm", ["e", "fc1.weight", "fc1.bias"], ["f"], "fc1", transB=1),
             helper.make_node("Mul", ["f", "scale"], ["g"], "scale"),
             helper.make_node("Gemm", ["g", "fc2.weight"], ["y"], "fc2", transB=1)]
    graph = helper.make_graph(nodes, "net", [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 12, 12])],
                              [helper.make_tensor_value_info("y", FLOAT, ["n", 10])], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), str(path))
    return sum(numpy.prod(one.dims) for one in constants)


def outputs(path, x):
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0]


def measured(programs, folder):
    """With statistics of its inputs a network loses less than without."""
    from onnx_statistics import Statistics  # pylint: disable=import-outside-toplevel

    x = (numpy.random.default_rng(2).normal(size=(64, 3, 1, 1)) * numpy.ones((1, 1, 12, 12))).astype("float32")
    seen = Statistics(str(folder / "net.onnx"))
    for first in range(0, 64, 16):
        seen.run({"x": x[first : first + 16]})
    write(folder / "seen.safetensors", {name: ("I64" if v.dtype == "int64" else "F64", v.shape, v.tobytes())
                                        for name, v in seen.sums.items()})
    programs.run("factorize_onnx", folder / "net.onnx", folder / "seen.onnx", "--rank-ratio", 0.25, "--statistics",
                 folder / "seen.safetensors", "--json", folder / "seen.json")
    kinds = {row["truncation"] for row in load(folder / "seen.json")["tensors"] if row["factorized"]}
    expect_equal(kinds, {"data-aware"}, "truncations")
    dense = outputs(folder / "net.onnx", x)
    losses = [float(numpy.abs(outputs(folder / name, x) - dense).mean()) for name in ("seen.onnx", "low.onnx")]
    print(f"mean error of outputs with statistics {losses[0]:.2e}, without {losses[1]:.2e}")
    expect(losses[0] < 0.5 * losses[1], f"statistics do not help: {losses}")


def test(programs, folder):
    net, low, report = folder / "net.onnx", folder / "low.onnx", folder / "low.json"
    parameters = network(net)
    text, _ = programs.run("factorize_onnx", net, low, "--rank-ratio", 0.25, "--explain", "--json", report)
    rows = {row["name"]: row for row in load(report)["tensors"]}
    expect_equal(list(rows), ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"], "weights, as the nodes")
    expect_equal({name: row.get("rank", row.get("reason")) for name, row in rows.items()},
                 {"conv1.weight": "the first layer", "conv2.weight": 8, "fc1.weight": 16, "fc2.weight": "the last layer"}, "ranks")
    expect("the first layer" in text and "2 of 4 weights factorized" in text, text)
    onnx.checker.check_model(str(low), full_check=True)
    expect_equal([node.name for node in onnx.load(str(low)).graph.node],
                 ["conv1", "relu1", "conv2.down", "conv2.up", "pool", "flatten", "fc1.down", "fc1.up", "scale", "fc2"], "nodes")
    expect_equal(load(report)["parameters_before"], int(parameters), "parameters")
    expect_equal(sum(int(numpy.prod(one.dims)) for one in onnx.load(str(low)).graph.initializer),
                 load(report)["parameters_after"], "parameters after")

    for budget, most in ((0.5, parameters // 2), (9000, 9000)):
        programs.run("factorize_onnx", net, folder / "budget.onnx", "--budget", budget, "--overwrite", "--json", report)
        after = load(report)["parameters_after"]
        expect(most * 0.9 < after <= most, f"budget {budget}: {after} parameters")
    programs.run("factorize_onnx", net, folder / "all.onnx", "--energy", 1, "--keep-first", 0, "--factorize-last")

    for arguments, problem in [((net, low), "exists"), ((folder / "none.onnx", folder / "x.onnx"), "cannot open"),
                               ((report, folder / "x.onnx"), "no ONNX model"), ((net, folder / "x.onnx", "--budget", 0.01), "too small"),
                               ((net, folder / "x.onnx", "--include", "("), "--include"),
                               ((net, folder / "x.onnx", "--budget", 0.5, "--energy", 0.5), "excludes")]:
        _, refused = programs.run("factorize_onnx", *arguments, fails=True)
        expect(problem in refused and not (folder / "x.onnx").exists(), f"{arguments}: {refused}")
    if onnxruntime is not None:
        measured(programs, folder)


main(test)
