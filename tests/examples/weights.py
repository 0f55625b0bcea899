# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Weight files for the tests: safetensors in a few lines, and a file with ResNet-50's names and shapes.

weights.py FILE writes the latter.
"""
import array
import json
import math
import pathlib
import random
import struct
import sys

SIZE = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1}


def write(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes), wide elements first in the file, as Python's safetensors has them."""
    header = {"__metadata__": metadata} if metadata else {}
    at = 0
    order = sorted(tensors, key=lambda name: (-SIZE[tensors[name][0]], name))
    for name in order:
        dtype, shape, data = tensors[name]
        assert len(data) == SIZE[dtype] * math.prod(shape), name
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name][2])


def read(path):
    """(tensors, metadata), as write takes them."""
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, of in header.items():
        begin, end = of["data_offsets"]
        assert begin % SIZE[of["dtype"]] == 0 and (8 + length) % 8 == 0, f"{name} is not aligned"
        tensors[name] = (of["dtype"], tuple(of["shape"]), data[8 + length + begin : 8 + length + end])
    return tensors, metadata


def resnet50():
    """Names and shapes of torchvision's ResNet-50, in the order of its state_dict."""
    entries = []

    def norm(name, channels):
        for part in ("weight", "bias", "running_mean", "running_var"):
            entries.append((f"{name}.{part}", "F32", (channels,)))
        entries.append((f"{name}.num_batches_tracked", "I64", ()))

    def conv(name, out, inputs, kernel):
        entries.append((f"{name}.weight", "F32", (out, inputs, kernel, kernel)))

    conv("conv1", 64, 3, 7)
    norm("bn1", 64)
    channels = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for n, (out, inputs, kernel) in enumerate([(width, channels, 1), (width, width, 3), (4 * width, width, 1)], 1):
                conv(f"{name}.conv{n}", out, inputs, kernel)
                norm(f"{name}.bn{n}", out)
            if block == 0:
                conv(f"{name}.downsample.0", 4 * width, channels, 1)
                norm(f"{name}.downsample.1", 4 * width)
            channels = 4 * width
    entries += [("fc.weight", "F32", (1000, 2048)), ("fc.bias", "F32", (1000,))]
    return entries


class Values:
    """Random floats in any number: a long table, scaled and read from where the last reading ended."""

    def __init__(self, seed=1, length=1000003):
        generator = random.Random(seed)
        self.length = length
        self.plain = [generator.uniform(-1.0, 1.0) for _ in range(length)]
        self.tables = {}
        self.at = 0

    def take(self, count, scale=1.0, shift=0.0):
        key = (scale, shift)
        if key not in self.tables:
            self.tables[key] = array.array("f", [scale * v + shift for v in self.plain])
        table, out = self.tables[key], array.array("f")
        while len(out) < count:
            out.extend(table[self.at : self.at + count - len(out)])
            self.at = (self.at + count) % self.length
        return out.tobytes()


def random_resnet50():
    """Its tensors, with values that keep activations at about one."""
    values = Values()
    tensors = {}
    for name, dtype, shape in resnet50():
        count = math.prod(shape)
        if dtype == "I64":
            data = struct.pack("<q", 100)
        elif len(shape) > 1:
            data = values.take(count, math.sqrt(6.0 / math.prod(shape[1:])))
        elif name.endswith(("running_var", "weight")):
            data = values.take(count, 0.25, 0.5 if "bn3" in name and name.endswith("weight") else 1.0)
        else:
            data = values.take(count, 0.1)
        tensors[name] = (dtype, shape, data)
    return tensors


if __name__ == "__main__":
    write(sys.argv[1], random_resnet50(), {"format": "pt"})
