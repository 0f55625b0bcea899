#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""onnx_large.py PROGRAMS MPIRUN

factorize_onnx on a model whose external data have more than 2 GiB: an embedding of 2.2 GB, which stays and is a hole in a sparse
file, between two small weights of rank 8. The new model has the same outputs, and ONNX's checker accepts it by its path. Exits
with 77 without Python's onnx, onnxruntime and numpy, or without 4 GB of free disk.
"""
import pathlib
import shutil
import sys

try:
    import numpy
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from support import expect, expect_equal, load, main  # noqa: E402

WIDTH, WORDS = 64, 8_600_000


def write_model(path):
    """x [n] -> rows of the table [n][64] -> two products. The table is zero but for its last row."""
    random = numpy.random.default_rng(1)
    table = WORDS * WIDTH * 4
    constants = []
    with open(f"{path}.data", "wb") as data:
        for name, shape, offset in (("first", (WIDTH, WIDTH), 0), ("table", (WORDS, WIDTH), 1 << 16),
                                    ("second", (WIDTH, WIDTH), (1 << 16) + table)):
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
            if name == "table":
                data.seek(offset + table - 4 * WIDTH)
                data.write(numpy.ones(WIDTH, "float32").tobytes())
            else:
                data.seek(offset)
                data.write((random.normal(size=(WIDTH, 8)) @ random.normal(size=(8, WIDTH))).astype("float32").tobytes())
            for key, value in (("location", path.name + ".data"), ("offset", offset), ("length", 4 * shape[0] * shape[1])):
                tensor.external_data.add(key=key, value=str(value))
            constants.append(tensor)
    nodes = [helper.make_node("Gather", ["table", "x"], ["a"]), helper.make_node("MatMul", ["a", "first"], ["b"], "first"),
             helper.make_node("MatMul", ["b", "second"], ["y"], "second")]
    graph = helper.make_graph(nodes, "large", [helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), str(path))


def outputs(path):
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": numpy.array([0, WORDS - 1])})[0]


def test(programs, folder):
    if shutil.disk_usage(folder).free < 4e9:
        print("skipped: less than 4 GB of free disk")
        sys.exit(77)
    large, low, report = folder / "large.onnx", folder / "low.onnx", folder / "low.json"
    write_model(large)
    want = outputs(large)
    programs.run("factorize_onnx", large, low, "--rank-ratio", 0.125, "--keep-first", 0, "--factorize-last", "--json", report)
    expect_equal({row["name"]: row.get("rank", row.get("reason")) for row in load(report)["tensors"]},
                 {"table": "an embedding", "first": 8, "second": 8}, "ranks")
    expect((folder / "low.onnx.data").stat().st_size > 1 << 31, "external data above 2 GiB")
    onnx.checker.check_model(str(low))
    difference = float(numpy.abs(outputs(low) - want).max() / numpy.abs(want).max())
    print(f"largest difference of an output: {difference:.1e} of the largest one")
    expect(difference < 1e-5 and numpy.abs(want[1]).max() > 1, f"outputs differ by {difference}")


main(test)
