#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Statistics for factorize_weights, taken in PyTorch.

torch_statistics.py make DENSE STATISTICS: writes the weights of a small network and what they met in two batches.
torch_statistics.py check MERGED REPORT: compares the predicted losses of a report with the errors of the merged weights.
Exits with 77 without PyTorch.
"""
import collections
import functools
import json
import sys

from torch_factors import state_of, torch
from torch import nn

from weights import write


# [statistics]
class Statistics:
    """Sums of what the weights of a model meet in its forward and backward passes. Batches come first in the inputs of
    its layers, and the loss is a mean over the samples of a batch."""

    def __init__(self, model):
        self.sums = {}
        for name, layer in model.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d, nn.Embedding)):
                layer.register_forward_hook(functools.partial(self.forward, f"{name}.weight"))

    def forward(self, weight, layer, inputs, outputs):
        table = isinstance(layer, nn.Embedding)
        width, samples = layer.embedding_dim if table else len(layer.weight), len(outputs)

        def rows_of(y):
            return (y.movedim(1, -1) if isinstance(layer, nn.Conv2d) else y).reshape(-1, width)

        def backward(gradient):
            rows = samples * rows_of(gradient)
            self.add(weight, "gradient_moment", rows.T @ rows)
            self.add(weight, "counts", torch.tensor([0, 0, len(rows), 0, 0, 0, 0]))

        rows = rows_of(outputs.detach())
        n = len(rows)
        if table:
            self.add(weight, "token_counts", torch.bincount(inputs[0].flatten(), minlength=layer.num_embeddings))
        else:
            self.add(weight, "output_moment", rows.T @ rows)
            self.add(weight, "output_sum", rows.sum(0))
        self.add(weight, "counts", torch.tensor([0, n, 0, 0, n, samples, 0] if table else [n, 0, 0, 0, n, samples, 0]))
        self.sums[f"{weight}.size"] = torch.tensor([width, layer.weight.numel() // width])
        if outputs.requires_grad:
            outputs.register_hook(backward)

    def add(self, weight, part, values):
        key = f"{weight}.{part}"
        self.sums[key] = self.sums.get(key, 0) + values.detach().double().cpu()
# [statistics]


def network():
    return nn.ModuleDict(collections.OrderedDict(
        first=nn.Conv2d(3, 24, 3, padding=1), norm=nn.BatchNorm2d(24), conv=nn.Conv2d(24, 32, 3, groups=2, bias=False),
        wte=nn.Embedding(50, 16), linear=nn.Linear(48, 40), last=nn.Linear(40, 5)))


def run(model, images, tokens):
    x = torch.relu(model["norm"](model["first"](images)))
    x = torch.relu(model["conv"](x)).mean((2, 3))
    x = torch.cat([x, model["wte"](tokens).sum(1)], 1)
    return model["last"](torch.relu(model["linear"](x)))


def batches():
    generator = torch.Generator().manual_seed(7)
    for samples in (12, 20):
        yield (torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 50, (samples, 6), generator=generator),
               torch.randint(0, 5, (samples,), generator=generator))


def make(dense, path):
    torch.manual_seed(3)
    model = network()
    state = {name: ("I64" if values.dtype == torch.int64 else "F32", tuple(values.shape), values.numpy().tobytes())
             for name, values in model.state_dict().items()}
    write(dense, state)
    seen = Statistics(model)
    for images, tokens, labels in batches():
        nn.functional.cross_entropy(run(model, images, tokens), labels).backward()
    write(path, {name: ("I64" if values.dtype == torch.int64 else "F64", tuple(values.shape), values.numpy().tobytes())
                 for name, values in seen.sums.items()})


def check(merged, report):
    """Half of the mean of (error of an output row, times gradient of a row)^2, times the rows of a sample: with every row
    of either, not with sums of them."""
    torch.manual_seed(3)
    model, state = network(), state_of(merged)
    errors, gradients, samples = collections.defaultdict(list), collections.defaultdict(list), 0
    replaced = {row["name"][:-len(".weight")]: row for row in json.load(open(report, encoding="utf-8"))["tensors"]
                if row["factorized"]}
    if sorted(replaced) != ["conv", "linear", "wte"]:
        sys.exit(f"{sorted(replaced)} have factors")

    def hook(name, layer, inputs, outputs):
        if name not in replaced:
            return
        lost = (layer.weight - state[f"{name}.weight"]).detach()
        with torch.no_grad():
            if isinstance(layer, nn.Conv2d):
                error = nn.functional.conv2d(inputs[0], lost, groups=layer.groups).movedim(1, -1)
            else:
                error = nn.functional.embedding(inputs[0], lost) if name == "wte" else inputs[0] @ lost.T
        errors[name].append(error.flatten(0, -2))
        by_row = (lambda g: g.movedim(1, -1)) if isinstance(layer, nn.Conv2d) else (lambda g: g)
        outputs.register_hook(lambda g: gradients[name].append(len(outputs) * by_row(g).flatten(0, -2)))

    for name, layer in model.items():
        layer.register_forward_hook(functools.partial(hook, name))
    for images, tokens, labels in batches():
        nn.functional.cross_entropy(run(model, images, tokens), labels).backward()
        samples += len(labels)
    for name, row in replaced.items():
        e, d = torch.cat(errors[name]).double(), torch.cat(gradients[name]).double()
        parts = row["matrices"]
        want = sum(((a @ b.T) ** 2).mean().item() for a, b in zip(e.chunk(parts, 1), d.chunk(parts, 1)))
        want *= 0.5 * len(e) / samples
        print(f"{name}: predicted loss {row['predicted_loss']:.3e}, from all rows {want:.3e}")
        # Each token of an embedding counts half an occurrence more.
        if not abs(row["predicted_loss"] - want) < (0.05 if name == "wte" else 0.02) * want:
            sys.exit(f"{name}: the report predicts {row['predicted_loss']}, the errors give {want}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
