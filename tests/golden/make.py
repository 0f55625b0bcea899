#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""make.py [--check] [--list] [CASE...]

What PyTorch computes, in double, for small instances of this library's layers and models: one safetensors file a case,
beside this script (Debian: python3-torch). --check computes again and compares with the files instead of writing them.

Nothing random goes in: parameters, inputs and labels are functions of their names and of the position in the tensor as
PyTorch sees it (`hashed`), which tests/unit/support/golden.hpp computes too. So a file holds results only.

The cases are in convolutional.py and sequences.py. To add one, write a function that returns a Case (cases.py) and
decorate it with @case("name"). A Case is a module whose parameters have the names that the library gives them, its
inputs, and a function from both to outputs and a loss. The file then holds, for the first training step, the outputs,
"loss", "gradient.NAME" of every parameter and "buffer.NAME"; "loss_after", the loss once the optimizer has taken STEPS
steps; and the outputs in evaluation mode then, "eval.NAME". With @tensors("name") a function gives all tensors itself.

Of a tensor with more than SAMPLES elements the file has SAMPLES, evenly spread (`sampled`), and its norm, "norm.NAME".
A gradient that is 0 but for rounding (of a shift that the next batch norm takes out again, say) is written as 0.
"""
import argparse
import json
import os
import pathlib
import struct
import sys

try:
    import numpy as np
    import torch
except ImportError as error:
    DEBIAN = "/usr/bin/python3"  # may have what another Python lacks
    if os.path.exists(DEBIAN) and os.path.realpath(DEBIAN) != os.path.realpath(sys.executable):
        os.execv(DEBIAN, [DEBIAN, *sys.argv])
    print(f"make.py needs PyTorch (Debian: python3-torch): {error}", file=sys.stderr)
    sys.exit(77)  # skipped, for Meson

sys.dont_write_bytecode = True
import convolutional  # noqa: E402, F401  (for its cases)
import sequences  # noqa: E402, F401
from cases import CASES  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-10  # of --check, relative to a tensor's norm: other versions of PyTorch add in another order

DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}


def to_array(tensor):
    array = tensor.detach().numpy()
    dtype = {np.float32: "F32", np.float64: "F64", np.int64: "I64"}[array.dtype.type]
    return dtype, list(array.shape), array.astype(DTYPES[dtype]).tobytes()


def write_safetensors(path, tensors):
    entries = sorted(((name, *to_array(t)) for name, t in tensors.items()), key=lambda e: (-DTYPES[e[1]].itemsize, e[0]))
    header, offset = {"__metadata__": {"made_by": "tests/golden/make.py", "torch": torch.__version__}}, 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(e[3] for e in entries))


def read_safetensors(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def problems_with(path, tensors):
    if not path.exists():
        return [f"{path.name} is not there"]
    stored = read_safetensors(path)
    if set(stored) != set(tensors):
        return [f"{path.name} has other tensors: {sorted(set(stored) ^ set(tensors))}"]
    problems = []
    for name, tensor in tensors.items():
        made = tensor.detach().numpy()
        if made.shape != stored[name].shape:
            problems.append(f"{path.name}: {name} has shape {stored[name].shape}, made now {made.shape}")
            continue
        tolerance = 1e-5 if made.dtype == np.float32 else TOLERANCE if not name.endswith("_after") else 1e-8
        tolerance = 1e-8 if name.startswith("eval.") and made.dtype == np.float64 else tolerance
        error = np.linalg.norm((made - stored[name]).astype(np.float64).ravel())
        if not error <= tolerance * np.linalg.norm(stored[name].astype(np.float64).ravel()):
            problems.append(f"{path.name}: {name} differs by {error:.3g}")
    return problems


def main():
    parser = argparse.ArgumentParser(description="Reference results of PyTorch for tests/unit/golden/*.cpp")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them if none is named")
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        sys.exit(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    problems = []
    for name in options.cases or CASES:
        path, tensors = HERE / f"{name}.safetensors", CASES[name]().run()
        if options.check:
            found = problems_with(path, tensors)
            problems += found
            print(f"{name}: {len(tensors)} tensors, {'differ' if found else 'as stored'}")
        else:
            write_safetensors(path, tensors)
            print(f"{name}: {len(tensors)} tensors, {path.stat().st_size} bytes")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
