#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""onnx_run.py FOLDER

Runs each model NAME.onnx of a folder in ONNX Runtime, once for each file of inputs NAME.CASE.in.safetensors, which
holds tensors by the names of the model's inputs. Writes its outputs to NAME.CASE.out.safetensors. The model is first
checked by Python's onnx, where that is installed. Exits with 77 if there is no ONNX Runtime.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
try:
    import numpy
    import onnxruntime
except ImportError as error:
    print(f"no ONNX Runtime for {sys.executable}: {error}")
    sys.exit(77)
try:
    import onnx
except ImportError:
    onnx = None

from weights import read, write

TYPES = {"F32": "float32", "F64": "float64", "I64": "int64", "BOOL": "bool"}
NAMES = {numpy.dtype(value): key for key, value in TYPES.items()}


def arrays(path):
    return {name: numpy.frombuffer(data, TYPES[dtype]).reshape(shape) for name, (dtype, shape, data) in read(path)[0].items()}


def main():
    for model in sorted(pathlib.Path(sys.argv[1]).glob("*.onnx")):
        if onnx is not None:
            onnx.checker.check_model(str(model), full_check=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        for inputs in sorted(model.parent.glob(f"{model.stem}.*.in.safetensors")):
            outputs = [numpy.ascontiguousarray(value) for value in session.run(None, arrays(inputs))]
            write(str(inputs).replace(".in.safetensors", ".out.safetensors"),
                  {name: (NAMES[value.dtype], value.shape, value.tobytes()) for name, value in zip(names, outputs)})


main()
