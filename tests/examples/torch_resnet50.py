#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch_resnet50.py WEIGHTS INPUT OUTPUT: ResNet-50 in PyTorch with the weights of a file, in which some layers
may be factors: those become two layers, `down` and `up`. INPUT has `images` in NHWC; OUTPUT gets `logits`.
All three are safetensors.
"""
import sys

from torch_factors import load_factors, state_of, torch
from torch import nn

from weights import write


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
            layers = []
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, 2 if block == 0 and stage > 1 else 1))
                inputs = 4 * width
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def main():
    torch.set_num_threads(1)
    model = ResNet50().eval()
    load_factors(model, state_of(sys.argv[1]))
    images = state_of(sys.argv[2])["images"].permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = model(images)
    write(sys.argv[3], {"logits": ("F32", tuple(logits.shape), logits.numpy().tobytes())})


main()
