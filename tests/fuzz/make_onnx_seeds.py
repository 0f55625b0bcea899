#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""make_onnx_seeds.py: writes seeds/fuzz_onnx, small models with every form of a weight. Needs Python's onnx and numpy."""
import pathlib

import numpy
import onnx
from onnx import helper, numpy_helper

FOLDER = pathlib.Path(__file__).resolve().parent / "seeds" / "fuzz_onnx"
FLOAT = onnx.TensorProto.FLOAT


def constant(name, *shape, dtype="float32"):
    return numpy_helper.from_array(numpy.arange(numpy.prod(shape)).reshape(shape).astype(dtype), name)


def save(name, nodes, constants, x, y, version=7, opset=13, change=None):
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", FLOAT, x)],
                              [helper.make_tensor_value_info("y", FLOAT, y)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version, producer_name="")
    if change:
        change(model)
    (FOLDER / name).write_bytes(model.SerializeToString())


def external(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "data"), ("offset", "0"), ("length", "48")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    node = helper.make_node
    product = [node("MatMul", ["x", "w"], ["y"], "n")]
    save("product", product, [constant("w", 3, 4)], ["n", 3], ["n", 4])
    save("external", product, [constant("w", 3, 4)], ["n", 3], ["n", 4], change=external)
    save("newer", product, [constant("w", 3, 4)], ["n", 3], ["n", 4], opset=21)
    save("applied", [node("MatMul", ["w", "x"], ["y"], "n")], [constant("w", 4, 3)], [3, "n"], [4, "n"])
    save("gemm", [node("Gemm", ["x", "w", "b"], ["y"], "n", alpha=0.5, beta=2.0)], [constant("w", 3, 4), constant("b", 4)],
         ["n", 3], ["n", 4])
    save("conv", [node("Conv", ["x", "w", "b"], ["y"], "n", group=2, pads=[1, 1])], [constant("w", 4, 2, 3), constant("b", 4)],
         ["n", 4, 5], ["n", 4, 5])
    save("double", product, [constant("w", 3, 4, dtype="float64")], ["n", 3], ["n", 4])
    save("lstm", [node("LSTM", ["x", "w", "r"], ["", "y"], "n", hidden_size=2)], [constant("w", 1, 8, 3), constant("r", 1, 8, 2)],
         [5, "n", 3], [1, "n", 2])
    value = numpy_helper.from_array(numpy.ones((3, 4), "float32"))
    save("constant", [node("Constant", [], ["w"], value=value), *product], [], ["n", 3], ["n", 4])
    old = [helper.make_tensor_value_info("w", FLOAT, [3, 4])]
    save("version3", product, [constant("w", 3, 4)], ["n", 3], ["n", 4], version=3, change=lambda m: m.graph.input.extend(old))
    branch = [helper.make_graph([node("MatMul", ["x", "w"], [name])], name, [], [helper.make_tensor_value_info(name, FLOAT, None)])
              for name in ("a", "b")]
    save("branches", [node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1])],
         [constant("w", 3, 4), constant("c", dtype="bool")], ["n", 3], ["n", 4])


main()
