# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Statistics for factorize_onnx, measured in ONNX Runtime.

onnx_statistics.py MODEL CALIBRATION STATISTICS: CALIBRATION is a safetensors file of inputs by name, cut into batches of
16 along their first dimension.
"""
import sys

import numpy
import onnx
import onnxruntime

from weights import read, write


# [statistics]
class Statistics:
    """Sums over the outputs of the nodes with constant weights in an ONNX model; of recurrent layers, over the inputs."""

    def __init__(self, path):
        model = onnx.load(path)
        shapes = {one.name: tuple(one.dims) for one in model.graph.initializer}
        self.sums, self.watched = {}, []
        for node in model.graph.node:
            left = node.op_type == "MatMul" and node.input[0] in shapes
            weight = node.input[0 if left else 1] if len(node.input) > 1 else ""
            if weight not in shapes:
                continue
            shape = shapes[weight]
            if node.op_type == "Conv":
                self.watch(weight, node.output[0], 1, "output", shape[0], int(numpy.prod(shape[1:])))
            elif node.op_type == "Gemm":
                turned = any(one.name == "transB" and one.i for one in node.attribute)
                self.watch(weight, node.output[0], -1, "output", *(shape if turned else shape[::-1]))
            elif node.op_type == "MatMul" and len(shape) == 2:
                self.watch(weight, node.output[0], -2 if left else -1, "output", *(shape if left else shape[::-1]))
            elif node.op_type in ("LSTM", "GRU", "RNN") and shape[0] == 1:
                self.watch(weight, node.input[0], -1, "input", shape[1], shape[2])
        values = {value for _, value, _, _ in self.watched} - {one.name for one in model.graph.input}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values
                                  if name not in {one.name for one in model.graph.output})
        self.session = onnxruntime.InferenceSession(model.SerializeToString())

    def watch(self, weight, value, axis, part, outputs, inputs):
        self.watched.append((weight, value, axis, part))
        self.sums[f"{weight}.size"] = numpy.array([outputs, inputs], "int64")

    def run(self, feeds):
        """Runs the model for inputs by name, and adds what its weights meet."""
        names = [value for _, value, _, _ in self.watched if value not in feeds]
        values = dict(zip(names, self.session.run(names, feeds))) | feeds
        for weight, value, axis, part in self.watched:
            rows = numpy.moveaxis(values[value], axis, -1)
            rows = rows.reshape(-1, rows.shape[-1]).astype("float64")
            n = len(rows)
            self.add(weight, f"{part}_moment", rows.T @ rows)
            self.add(weight, f"{part}_sum", rows.sum(0))
            self.add(weight, "counts", numpy.array([n * (part == "output"), n * (part == "input"), 0, 0, n, n, 0], "float64"))

    def add(self, weight, part, values):
        key = f"{weight}.{part}"
        self.sums[key] = self.sums.get(key, 0.0) + values
# [statistics]


def main():
    seen = Statistics(sys.argv[1])
    inputs = {name: numpy.frombuffer(data, {"F32": "float32", "I64": "int64"}[dtype]).reshape(shape)
              for name, (dtype, shape, data) in read(sys.argv[2])[0].items()}
    for first in range(0, len(next(iter(inputs.values()))), 16):
        seen.run({name: values[first : first + 16] for name, values in inputs.items()})
    write(sys.argv[3], {name: ("I64" if values.dtype == "int64" else "F64", values.shape, values.tobytes())
                        for name, values in seen.sums.items()})


if __name__ == "__main__":
    main()
