#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""make.py [--check] [--list] [CASE...]

What PyTorch computes, in double, for small instances of this library's layers and models: one safetensors file a case,
beside this script (Debian: python3-torch). --check computes again and compares with the files instead of writing them.

Nothing random goes in: parameters, inputs and labels are functions of their names and of the position in the tensor as
PyTorch sees it (`hashed`), which tests/unit/golden.hpp computes too. So a file holds results only.

To add a case, write a function that returns a Case and decorate it with @case("name"). A Case is a module whose
parameters have the names that the library gives them, its inputs, and a function from both to outputs and a loss. The
file then holds, for the first training step, the outputs, "loss", "gradient.NAME" of every parameter and "buffer.NAME";
"loss_after", the loss once the optimizer has taken STEPS steps; and the outputs in evaluation mode then, "eval.NAME".

Of a tensor with more than SAMPLES elements the file has so many, evenly spread (`sampled`), and its norm, "norm.NAME".
A gradient that is 0 but for rounding (of a shift that the next batch norm takes out again, say) is written as 0.
"""
import argparse
import json
import math
import pathlib
import struct
import sys
from collections import OrderedDict

try:
    import numpy as np
    import torch
    from torch import nn
except ImportError as error:
    print(f"make.py needs PyTorch (Debian: python3-torch): {error}", file=sys.stderr)
    sys.exit(77)  # skipped, for Meson

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 20
SAMPLES = 96
TOLERANCE = 1e-10  # of --check, relative to a tensor's norm: other versions of PyTorch add in another order
CASES = {}


# ---------------------------------------------------------------------------------------------------- numbers from names

def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def hashed(name, shape):
    """Numbers in [-1, 1) with 24 bits, a function of the name and of each position (row-major)."""
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a(name)) + np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0).reshape(shape)


def initial_value(name, p, module):
    """Weights U(+-sqrt(3 / fan in)), normalisations around 1 and 0, other biases around 0.

    Batch norms have biases around 2: few of the values that a ReLU sees are then so close to 0 that rounding decides what
    becomes of them, which in single precision would be a step in a gradient.
    """
    u = hashed(name, tuple(p.shape))
    if p.dim() > 1:
        return u * math.sqrt(3.0 / (p.numel() / p.shape[0]))
    if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
        return 0.25 * u + (1.0 if name.endswith("weight") else 2.0 if isinstance(module, nn.BatchNorm2d) else 0.0)
    return 0.125 * u


def set_values(model):
    for module_name, module in model.named_modules():
        for p_name, p in module.named_parameters(recurse=False):
            name = f"{module_name}.{p_name}" if module_name else p_name
            p.data.copy_(initial_value(name, p, module))


# ----------------------------------------------------------------------------------------------------------------- cases

class Case:
    def __init__(self, model, inputs, step, optimizer=None):
        self.model = model.double()
        self.inputs = inputs
        self.step = step  # (model, inputs) -> (outputs by name, loss)
        self.optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.0005, momentum=0.9, weight_decay=1e-4))

    def run(self):
        set_values(self.model)
        self.model.train()
        optimizer = self.optimizer(self.model.parameters())
        tensors = {}
        for number in range(STEPS):
            optimizer.zero_grad()
            outputs, loss = self.step(self.model, self.inputs)
            loss.backward()
            if number == 0:
                tensors.update(outputs)
                tensors["loss"] = loss
                largest = max(float(p.grad.norm()) for p in self.model.parameters())
                for name, p in self.model.named_parameters():
                    tiny = float(p.grad.norm()) < 1e-12 * largest
                    tensors["gradient." + name] = torch.zeros_like(p) if tiny else p.grad.clone()
                for name, b in self.model.named_buffers():
                    tensors["buffer." + name] = b.clone()
            optimizer.step()
        with torch.no_grad():
            tensors["loss_after"] = self.step(self.model, self.inputs)[1]
            self.model.eval()
            for name, output in self.step(self.model, self.inputs)[0].items():
                tensors["eval." + name] = output
        return sampled(tensors)


def sampled(tensors):
    """What goes into a file; number i of n elements is the one at i * n // SAMPLES."""
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if tensor.numel() > SAMPLES:
            result["norm." + name] = tensor.norm()
            tensor = tensor.flatten()[torch.arange(SAMPLES) * tensor.numel() // SAMPLES]
        result[name] = tensor
    return result


def case(name):
    def add(function):
        CASES[name] = function
        return function
    return add


def classifier_case(model, image, classes, name, count=8):
    """Images through a classifier, mean cross entropy. `name`: that of the images' numbers. Names differ so that no step
    has a value so near a kink (of a ReLU, of a maximum) that rounding in single precision takes it to the other side."""
    def step(net, inputs):
        logits = net(inputs["input"])
        return {"logits": logits}, nn.functional.cross_entropy(logits, inputs["labels"])
    labels = torch.tensor([(7 * n + 3) % classes for n in range(count)])
    return Case(model, {"input": hashed(name, (count, *image)), "labels": labels}, step)


# ---------------------------------------------------------------------------------------------------------------- layers

def factor_rank(out, inputs):
    return max(1, min(out, inputs) // 4)


def conv(c_in, out, kernel, stride=1, padding=0, bias=False, rank=None, norm=False, dilation=1):
    """A convolution, or its two factors, with a batch norm between them if asked."""
    if rank is None:
        return nn.Conv2d(c_in, out, kernel, stride, padding, dilation, bias=bias)
    parts = OrderedDict(down=nn.Conv2d(c_in, rank, kernel, stride, padding, dilation, bias=False))
    if norm:
        parts["bn"] = nn.BatchNorm2d(rank)
    parts["up"] = nn.Conv2d(rank, out, 1, bias=bias)
    return nn.Sequential(parts)


def linear(c_in, out, rank=None):
    if rank is None:
        return nn.Linear(c_in, out)
    return nn.Sequential(OrderedDict(down=nn.Linear(c_in, rank, bias=False), up=nn.Linear(rank, out)))


# One module each, an input, and the gradient of the output: y, dx and the parameters' gradients.
LAYERS = {
    "conv3x3": (lambda: conv(3, 5, 3, 1, 1), (2, 3, 4, 5)),
    "conv3x3_stride2_bias": (lambda: conv(3, 4, 3, 2, 1, bias=True), (2, 3, 5, 4)),
    "conv3x3_dilated": (lambda: conv(3, 4, 3, 1, 2, dilation=2), (1, 3, 6, 5)),
    "conv1x1": (lambda: conv(6, 9, 1), (2, 6, 3, 2)),
    "conv1x1_stride2": (lambda: conv(6, 9, 1, 2), (2, 6, 5, 4)),
    "conv7x7_stride2": (lambda: conv(3, 4, 7, 2, 3), (1, 3, 9, 8)),
    "linear": (lambda: linear(11, 6), (5, 11)),
    "low_rank_conv3x3_stride2": (lambda: conv(4, 6, 3, 2, 1, rank=3), (2, 4, 4, 5)),
    "low_rank_conv3x3_bias": (lambda: conv(4, 6, 3, 1, 1, bias=True, rank=2), (2, 4, 3, 4)),
    "low_rank_conv1x1_stride2": (lambda: conv(8, 12, 1, 2, rank=4), (2, 8, 5, 4)),
    "low_rank_conv7x7_stride2": (lambda: conv(3, 5, 7, 2, 3, rank=3), (1, 3, 9, 8)),
    "low_rank_norm_conv3x3": (lambda: conv(4, 6, 3, 1, 1, rank=3, norm=True), (2, 4, 4, 3)),
    "low_rank_linear": (lambda: linear(11, 6, rank=3), (5, 11)),
    "batch_norm": (lambda: nn.BatchNorm2d(5), (2, 5, 4, 3)),
    "max_pool2": (lambda: nn.MaxPool2d(2), (2, 3, 5, 4)),
    "max_pool3_stride2_padded": (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 5, 6)),
    "average_pool2": (lambda: nn.AvgPool2d(2), (2, 3, 4, 5)),
    "average_pool3_stride2_padded": (lambda: nn.AvgPool2d(3, 2, 1), (2, 3, 5, 6)),
    "global_average_pool": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 4, 5)),
    "relu": (nn.ReLU, (2, 3, 4, 5)),
}


class AllLayers:
    """Not a model: every entry of LAYERS on its own, its tensors under its name."""

    def run(self):
        tensors = {}
        for name, (make, shape) in LAYERS.items():
            module = make().double()
            set_values(module)
            x = hashed("input", shape).requires_grad_()
            y = module(x)
            y.backward(hashed("output_gradient", tuple(y.shape)))
            tensors[f"{name}.output"] = y
            tensors[f"{name}.input_gradient"] = x.grad
            for p_name, p in module.named_parameters():
                tensors[f"{name}.gradient.{p_name}"] = p.grad
            for b_name, b in module.named_buffers():
                tensors[f"{name}.buffer.{b_name}"] = b
        return tensors


@case("layers")
def layers():
    return AllLayers()


# ---------------------------------------------------------------------------------------------------------------- models

class Vgg(nn.Module):
    """`stages`: convolutions of each; `first`: number of the first factorized layer, None for a dense network."""

    def __init__(self, stages, width, classes, lottery=False, first=None):
        super().__init__()
        self.lottery = lottery
        self.plan = []
        channels, number = 3, 0
        for stage, count in enumerate(stages):
            out = width << min(stage, 3)
            for _ in range(count):
                number += 1
                rank = factor_rank(out, channels * 9) if first and number >= first else None
                setattr(self, f"conv{number}", conv(channels, out, 3, 1, 1, rank=rank))
                setattr(self, f"batch_norm{number}", nn.BatchNorm2d(out))
                self.plan.append(number)
                channels = out
            self.plan.append("average" if lottery and stage + 1 == len(stages) else "maximum")
        if lottery:
            self.fc = nn.Linear(channels, classes)
        else:
            rank = factor_rank(channels, channels) if first else None
            self.classifier = nn.Sequential(
                nn.Dropout(0.0), linear(channels, channels, rank), nn.ReLU(), nn.Dropout(0.0),
                linear(channels, channels, rank), nn.ReLU(), nn.Linear(channels, classes))

    def forward(self, x):
        for item in self.plan:
            if item == "maximum":
                x = nn.functional.max_pool2d(x, 2)
            elif item == "average":
                x = nn.functional.avg_pool2d(x, 2)
            else:
                x = torch.relu(getattr(self, f"batch_norm{item}")(getattr(self, f"conv{item}")(x)))
        x = x.flatten(1)
        return self.fc(x) if self.lottery else self.classifier(x)


class Block(nn.Module):
    """A residual block. `shapes`: (in, out, kernel, stride) of its convolutions; `ranks`: theirs and the shortcut's."""

    def __init__(self, shapes, shortcut_name, ranks=None, norm=False):
        super().__init__()
        ranks = ranks or [None] * (len(shapes) + 1)
        self.count = len(shapes)
        self.shortcut_name = None
        for i, (c_in, out, kernel, stride) in enumerate(shapes):
            setattr(self, f"conv{i + 1}", conv(c_in, out, kernel, stride, kernel // 2, rank=ranks[i], norm=norm))
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(out))
        c_in, out, stride = shapes[0][0], shapes[-1][1], max(s[3] for s in shapes)
        if stride != 1 or c_in != out:
            self.shortcut_name = shortcut_name
            setattr(self, shortcut_name,
                    nn.Sequential(conv(c_in, out, 1, stride, rank=ranks[-1]), nn.BatchNorm2d(out)))

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            if i < self.count:
                y = torch.relu(y)
        return torch.relu(y + (getattr(self, self.shortcut_name)(x) if self.shortcut_name else x))


class ResNet(nn.Module):
    def __init__(self, stem, blocks, features, classes, last):
        super().__init__()
        self.last = last
        for name, module in stem.items():
            setattr(self, name, module)
        self.stem = list(stem)
        for i, stage in enumerate(blocks):
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
        self.stages = len(blocks)
        setattr(self, last, nn.Linear(features, classes))

    def forward(self, x):
        x = getattr(self, "conv1")(x)
        x = torch.relu(self.bn1(x) if "bn1" in self.stem else x)
        if "maxpool" in self.stem:
            x = self.maxpool(x)
        for i in range(1, self.stages + 1):
            x = getattr(self, f"layer{i}")(x)
        return getattr(self, self.last)(x.mean((2, 3)))


def small_resnet18(width, classes, first=None):
    """For CIFAR, without stem norm; `first`: number of the first factorized convolution, shortcuts not counted."""
    number, channels, stages = 1, width, []
    for stage in range(4):
        out, blocks = width << stage, []
        for block in range(2):
            shapes = [(channels, out, 3, 2 if stage > 0 and block == 0 else 1), (out, out, 3, 1)]
            ranks = []
            for c_in, c_out, kernel, _ in shapes:
                number += 1
                ranks.append(factor_rank(c_out, c_in * kernel**2) if first and number >= first else None)
            blocks.append(Block(shapes, "shortcut", [*ranks, None]))
            channels = out
        stages.append(blocks)
    return ResNet({"conv1": conv(3, width, 3, 1, 1)}, stages, channels, classes, "linear")


def imagenet_resnet(width, classes, bottleneck, inner=1, rank=lambda stage, shapes: None, norm=False):
    """One block a stage. `rank`: from the stage and a block's shapes to its ranks."""
    channels, stages = width, []
    for stage in range(4):
        planes, stride = width << stage, 2 if stage > 0 else 1
        if bottleneck:
            mid, out = planes * inner, 4 * planes
            shapes = [(channels, mid, 1, 1), (mid, mid, 3, stride), (mid, out, 1, 1)]
        else:
            out = planes
            shapes = [(channels, out, 3, stride), (out, out, 3, 1)]
        stages.append([Block(shapes, "downsample", rank(stage, shapes), norm)])
        channels = out
    stem = {"conv1": conv(3, width, 7, 2, 3), "bn1": nn.BatchNorm2d(width), "maxpool": nn.MaxPool2d(3, 2, 1)}
    return ResNet(stem, stages, channels, classes, "fc")


def quarter_ranks(shapes):
    """The paper's: 1/4 of the smaller side, of the shortcut too."""
    ranks = [factor_rank(out, c_in * kernel**2) for c_in, out, kernel, _ in shapes]
    return [*ranks, factor_rank(shapes[-1][1], shapes[0][0])]


def reference_ranks(shapes):
    """Those of the paper's pure low-rank networks of bottlenecks."""
    out = shapes[-1][1]
    return [max(1, shapes[0][1] // 4), max(1, shapes[1][1] // 4), quarter_ranks(shapes)[2], max(1, out // 16)]


@case("vgg11")
def vgg11():
    return classifier_case(Vgg([1, 1, 2, 2, 2], 8, 5), (3, 32, 32), 5, "input 35")


@case("vgg11_hybrid")
def vgg11_hybrid():
    return classifier_case(Vgg([1, 1, 2, 2, 2], 8, 5, first=6), (3, 32, 32), 5, "input 38")


@case("vgg19_lth")
def vgg19_lth():
    return classifier_case(Vgg([2, 2, 4, 4, 4], 4, 5, lottery=True), (3, 32, 32), 5, "input 33")


@case("resnet18")
def resnet18():
    return classifier_case(small_resnet18(8, 5), (3, 16, 16), 5, "input 6")


@case("resnet18_hybrid")
def resnet18_hybrid():
    return classifier_case(small_resnet18(8, 5, first=4), (3, 16, 16), 5, "input 6")


@case("resnet50")
def resnet50():
    return classifier_case(imagenet_resnet(8, 5, True), (3, 33, 33), 5, "input 38")


@case("resnet50_hybrid")
def resnet50_hybrid():
    return classifier_case(
        imagenet_resnet(8, 5, True, rank=lambda stage, shapes: quarter_ranks(shapes) if stage == 3 else None),
        (3, 33, 33), 5, "input 2")


@case("wide_resnet50_2_lowrank")
def wide_resnet50_2_lowrank():
    return classifier_case(imagenet_resnet(8, 5, True, inner=2, rank=lambda _, shapes: reference_ranks(shapes)),
                           (3, 33, 33), 5, "input 14")


@case("resnet34_factor_bn")
def resnet34_factor_bn():
    def rank(_, shapes):
        return [max(1, shapes[0][1] // 4)] * 2 + [None]
    return classifier_case(imagenet_resnet(16, 5, False, rank=rank, norm=True), (3, 33, 33), 5, "input 17")


class StateDict:
    """A module's state as it goes into a weight file, float and int64, and what it makes of an input."""

    def run(self):
        model = small_resnet18(1, 3)
        set_values(model)
        model.train()
        for seed in ("first", "second"):
            model(hashed(seed, (4, 3, 8, 8)).float())
        model.eval()
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            tensors["eval.logits"] = model(hashed("input", (2, 3, 8, 8)).float())
        return tensors


@case("state_dict")
def state_dict():
    return StateDict()


# ----------------------------------------------------------------------------------------------------------------- files

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
    parser = argparse.ArgumentParser(description="Reference results of PyTorch for tests/unit/golden_*.cpp")
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
