# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cases of make.py: the layers of convolutional networks, and a small instance of each family."""
from collections import OrderedDict

import torch
from torch import nn

from cases import Case, alone, case, factor_rank, hashed, linear, set_values, tensors


# -------------------------------------------------------------------------------------------------------------- layers

def conv(c_in, out, kernel, stride=1, padding=0, bias=False, rank=None, norm=False, dilation=1, groups=1):
    """A convolution, or its two factors, with a batch norm between them if asked. The rank is that of each group."""
    if rank is None:
        return nn.Conv2d(c_in, out, kernel, stride, padding, dilation, groups, bias=bias)
    inner = groups * rank
    parts = OrderedDict(down=nn.Conv2d(c_in, inner, kernel, stride, padding, dilation, groups, bias=False))
    if norm:
        parts["bn"] = nn.BatchNorm2d(inner)
    parts["up"] = nn.Conv2d(inner, out, 1, groups=groups, bias=bias)
    return nn.Sequential(parts)


# One module each, an input, and the gradient of the output: y, dx and the parameters' gradients.
LAYERS = {
    "conv3x3": (lambda: conv(3, 5, 3, 1, 1), (2, 3, 4, 5)),
    "conv3x3_stride2_bias": (lambda: conv(3, 4, 3, 2, 1, bias=True), (2, 3, 5, 4)),
    "conv3x3_dilated": (lambda: conv(3, 4, 3, 1, 2, dilation=2), (1, 3, 6, 5)),
    "conv1x1": (lambda: conv(6, 9, 1), (2, 6, 3, 2)),
    "conv1x1_stride2": (lambda: conv(6, 9, 1, 2), (2, 6, 5, 4)),
    "conv7x7_stride2": (lambda: conv(3, 4, 7, 2, 3), (1, 3, 9, 8)),
    "grouped_conv3x3": (lambda: conv(6, 4, 3, 1, 1, bias=True, groups=2), (2, 6, 4, 5)),
    "grouped_conv3x3_stride2": (lambda: conv(6, 9, 3, 2, 1, groups=3), (2, 6, 5, 4)),
    "grouped_conv1x1": (lambda: conv(6, 9, 1, groups=3), (2, 6, 3, 2)),
    "depthwise_conv3x3": (lambda: conv(5, 5, 3, 1, 1, bias=True, groups=5), (2, 5, 4, 6)),
    "depthwise_conv3x3_stride2": (lambda: conv(5, 5, 3, 2, 1, groups=5), (2, 5, 7, 6)),
    "depthwise_conv5x5_dilated": (lambda: conv(4, 4, 5, 1, 4, dilation=2, groups=4), (1, 4, 6, 5)),
    "depthwise_conv3x3_multiplier": (lambda: conv(4, 8, 3, 1, 1, bias=True, groups=4), (2, 4, 5, 3)),
    "linear": (lambda: linear(11, 6), (5, 11)),
    "low_rank_conv3x3_stride2": (lambda: conv(4, 6, 3, 2, 1, rank=3), (2, 4, 4, 5)),
    "low_rank_conv3x3_bias": (lambda: conv(4, 6, 3, 1, 1, bias=True, rank=2), (2, 4, 3, 4)),
    "low_rank_conv1x1_stride2": (lambda: conv(8, 12, 1, 2, rank=4), (2, 8, 5, 4)),
    "low_rank_conv7x7_stride2": (lambda: conv(3, 5, 7, 2, 3, rank=3), (1, 3, 9, 8)),
    "low_rank_grouped_conv3x3": (lambda: conv(6, 8, 3, 1, 1, bias=True, rank=3, groups=2), (2, 6, 4, 5)),
    "low_rank_grouped_conv3x3_stride2": (lambda: conv(6, 9, 3, 2, 1, rank=2, groups=3), (2, 6, 5, 4)),
    "low_rank_depthwise_conv3x3": (lambda: conv(4, 8, 3, 1, 1, rank=1, groups=4), (2, 4, 5, 3)),
    "low_rank_norm_grouped_conv3x3": (lambda: conv(4, 6, 3, 1, 1, rank=2, norm=True, groups=2), (2, 4, 4, 3)),
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


@tensors("layers")
def layers():
    result = {}
    for name, (make, shape) in LAYERS.items():
        inputs = {"input": hashed("input", shape)}
        result.update(alone(name, make(), inputs, lambda module, input: {"output": module(input)}))
    return result


# -------------------------------------------------------------------------------------------------------------- models

def classifier_case(model, image, classes, name, count=8):
    """Images through a classifier, mean cross entropy. `name`: that of the images' numbers. Names differ so that no step
    has a value so near a kink (of a ReLU, of a maximum) that rounding in single precision takes it to the other side."""
    def step(net, inputs):
        logits = net(inputs["input"])
        return {"logits": logits}, nn.functional.cross_entropy(logits, inputs["labels"])
    labels = torch.tensor([(7 * n + 3) % classes for n in range(count)])
    return Case(model, {"input": hashed(name, (count, *image)), "labels": labels}, step)


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


@tensors("state_dict")
def state_dict():
    """A module's state as it goes into a weight file, float and int64, and what it makes of an input."""
    model = small_resnet18(1, 3)
    set_values(model)
    model.train()
    for seed in ("first", "second"):
        model(hashed(seed, (4, 3, 8, 8)).float())
    model.eval()
    result = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        result["eval.logits"] = model(hashed("input", (2, 3, 8, 8)).float())
    return result
