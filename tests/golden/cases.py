# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the cases of make.py are made of."""
import math
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

STEPS = 20
SAMPLES = 96
CASES = {}


# -------------------------------------------------------------------------------------------------- numbers from names

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
    done = set()  # a tied parameter goes by its first name
    for module_name, module in model.named_modules():
        for p_name, p in module.named_parameters(recurse=False):
            name = f"{module_name}.{p_name}" if module_name else p_name
            if p not in done:
                p.data.copy_(initial_value(name, p, module))
                done.add(p)


# --------------------------------------------------------------------------------------------------------------- cases

class Case:
    def __init__(self, model, inputs, step, optimizer=None, clip=None):
        self.model = model.double()
        self.inputs = inputs
        self.step = step  # (model, inputs) -> (outputs by name, loss)
        self.clip = clip  # largest norm of the gradient
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
                tensors.update(gradients(self.model))
                for name, b in self.model.named_buffers():
                    tensors["buffer." + name] = b.clone()
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            optimizer.step()
        with torch.no_grad():
            tensors["loss_after"] = self.step(self.model, self.inputs)[1]
            self.model.eval()
            for name, output in self.step(self.model, self.inputs)[0].items():
                tensors["eval." + name] = output
        return sampled(tensors)


def gradients(module):
    """Of all parameters; those that are 0 but for rounding as zeros."""
    largest = max((float(p.grad.norm()) for p in module.parameters()), default=0.0)
    return {"gradient." + name: p.grad.clone() if float(p.grad.norm()) >= 1e-12 * largest else torch.zeros_like(p)
            for name, p in module.named_parameters()}


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


def tensors(name):
    """As case(name), for a function that gives the file's tensors itself."""
    def add(function):
        CASES[name] = lambda: SimpleNamespace(run=function)
        return function
    return add


# ------------------------------------------------------------------------------------------------- layers that all use

def factor_rank(out, inputs):
    return max(1, min(out, inputs) // 4)


def linear(c_in, out, rank=None, bias=True):
    """A linear layer, or its two factors."""
    if rank is None:
        return nn.Linear(c_in, out, bias=bias)
    return nn.Sequential(OrderedDict(down=nn.Linear(c_in, rank, bias=False), up=nn.Linear(rank, out, bias=bias)))


def alone(name, module, inputs, call):
    """A module on its own, with given gradients of its outputs: outputs, gradients of inputs and parameters, buffers,
    all under `name`. `call`: (module, **inputs) -> outputs by name."""
    module = module.double()
    set_values(module)
    for x in inputs.values():
        x.requires_grad_()
    outputs = call(module, **inputs)
    sum((y * hashed(f"{key}_gradient", tuple(y.shape))).sum() for key, y in outputs.items()).backward()
    tensors = dict(outputs)
    tensors.update({f"{key}_gradient": x.grad for key, x in inputs.items()})
    tensors.update(gradients(module))
    tensors.update({f"buffer.{key}": b for key, b in module.named_buffers()})
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}
