#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Factors of factorize_weights in PyTorch.

torch_factors.py make DENSE: writes the weights of a small network to the file DENSE.
torch_factors.py check LOW MERGED: loads LOW, with factors, and MERGED, with their products, into that network, and
compares what both networks compute, module by module. Exits with 77 without PyTorch.
"""
import collections
import os
import sys

DEBIAN = "/usr/bin/python3"  # may have packages that another Python lacks
try:
    import numpy  # noqa: F401: Tensor.numpy() needs the package
    import torch
except ImportError as error:
    if os.path.exists(DEBIAN) and os.path.realpath(sys.executable) != os.path.realpath(DEBIAN):
        os.execv(DEBIAN, [DEBIAN, *sys.argv])
    print(f"there is no PyTorch (Debian: python3-torch): {error}", file=sys.stderr)
    sys.exit(77)

from torch import nn

from weights import read, write

TYPES = {"F32": torch.float32, "I64": torch.int64}
GROUPS, MODEL = 4, 32


def state_of(path):
    """What safetensors.torch.load_file returns."""
    state = {}
    for name, (dtype, shape, data) in read(path)[0].items():
        state[name] = torch.frombuffer(bytearray(data), dtype=TYPES[dtype]).reshape(shape)
    return state


# [replace]
def two_layers(layer, rank):
    """A layer as two, whose parameters are called down.weight, up.weight and up.bias."""
    bias = getattr(layer, "bias", None) is not None
    if isinstance(layer, nn.Embedding):
        down = nn.Embedding(layer.num_embeddings, rank, layer.padding_idx)
        up = nn.Linear(rank, layer.embedding_dim, bias=False)
    elif isinstance(layer, nn.Conv2d):
        groups = layer.groups
        down = nn.Conv2d(layer.in_channels, groups * rank, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
                         groups, bias=False)
        up = nn.Conv2d(groups * rank, layer.out_channels, 1, groups=groups, bias=bias)
    else:
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=bias)
    return nn.Sequential(collections.OrderedDict(down=down, up=up))


def load_factors(model, state):
    """Replaces the layers of which a state_dict has factors, and loads it."""
    for name, layer in list(model.named_modules()):
        if f"{name}.down.weight" in state:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, two_layers(layer, state[f"{name}.up.weight"].shape[1]))
    model.load_state_dict(state, strict=True)
# [replace]


def network():
    return nn.ModuleDict(collections.OrderedDict(
        wte=nn.Embedding(200, MODEL), table=nn.Embedding(60, MODEL, padding_idx=1),
        conv=nn.Conv2d(MODEL, 48, 3, stride=2, padding=1, groups=GROUPS),
        plain=nn.Conv2d(MODEL, 48, (3, 1), dilation=2), depthwise=nn.Conv2d(MODEL, MODEL, 3, groups=MODEL),
        linear=nn.Linear(MODEL, 40), attention=nn.MultiheadAttention(MODEL, 4)))


def outputs(model):
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(2, MODEL, 9, 7, generator=generator)
    rows = torch.randn(3, 2, MODEL, generator=generator)
    tokens = torch.randint(0, 60, (3, 5), generator=generator)
    inputs = {"wte": tokens, "table": tokens, "linear": rows}
    with torch.no_grad():
        made = {name: layer(inputs.get(name, images)) for name, layer in model.items() if name != "attention"}
        made["attention"] = model["attention"](rows, rows, rows)[0]
    return made


def make(path):
    torch.manual_seed(3)
    tensors = {}
    for name, values in network().state_dict().items():
        tensors[name] = ("F32", tuple(values.shape), values.numpy().tobytes())
    write(path, tensors)


def check(low_path, merged_path):
    low, merged = state_of(low_path), state_of(merged_path)
    # MultiheadAttention has one weight for query, key and value: the products of its factors are loaded.
    down, up = low.pop("attention.in_proj_weight.down"), low.pop("attention.in_proj_weight.up")
    low["attention.in_proj_weight"] = torch.cat([u @ d for u, d in zip(up.chunk(3), down.chunk(3))])
    factorized, dense = network(), network()
    out_proj = "attention.out_proj"  # not called as a module by MultiheadAttention
    low[f"{out_proj}.weight"] = low.pop(f"{out_proj}.up.weight") @ low.pop(f"{out_proj}.down.weight")
    low[f"{out_proj}.bias"] = low.pop(f"{out_proj}.up.bias")
    load_factors(factorized, low)
    dense.load_state_dict(merged, strict=True)
    replaced = sorted(name for name, layer in factorized.items() if isinstance(layer, nn.Sequential))
    if replaced != ["conv", "linear", "plain", "table", "wte"]:
        sys.exit(f"{replaced} have factors")
    have, want = outputs(factorized), outputs(dense)
    for name, values in want.items():
        distance = (have[name] - values).abs().max().item()
        print(f"{name}: outputs up to {values.abs().max().item():.3f}, with factors they differ by {distance:.1e}")
        if have[name].shape != values.shape or not distance <= 1e-5:
            sys.exit(f"{name}: the factors compute something else than their product")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
