#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""peer_torch.py --threads N

PyTorch's side of bench/compare: answers requests for single measurements, a JSON object a line. How it is tuned is the
environment's business (bench/compare sets it).
"""
import argparse
import json
import struct
import sys
import time
import warnings

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from torch import nn  # noqa: E402

LAYOUTS = {"channels last": torch.channels_last, "contiguous": torch.contiguous_format}


def timed(request, body, before=lambda: None):
    ms = []
    for i in range(-request.get("warm_up", 1), request.get("samples", 3)):
        before()
        start = time.perf_counter()
        body()
        if i >= 0:
            ms.append((time.perf_counter() - start) * 1e3)
    return {"ms": ms}


def conv(c_in, c_out, kernel=3, stride=1, padding=1, rank=0):
    """A convolution without bias, or the pair that factorizing makes of it."""
    if not rank:
        return nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False)
    return nn.Sequential(nn.Conv2d(c_in, rank, kernel, stride, padding, bias=False),
                         nn.Conv2d(rank, c_out, 1, bias=False))


class Block(nn.Module):
    """A basic block of ResNet-18, factorized or not."""

    def __init__(self, c_in, c_out, stride, low_rank):
        super().__init__()
        rank = c_out // 4 if low_rank else 0
        self.conv1 = conv(c_in, c_out, stride=stride, rank=rank)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = conv(c_out, c_out, rank=rank)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(conv(c_in, c_out, 1, stride, 0), nn.BatchNorm2d(c_out))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def resnet18(hybrid):
    """As the paper trains it on CIFAR-10: no batch norm behind the stem; the hybrid keeps the first block dense."""
    layers = [conv(3, 64), nn.ReLU(inplace=True)]
    c_in = 64
    for stage, c_out in enumerate([64, 128, 256, 512]):
        for block in range(2):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(c_in, c_out, stride, hybrid and (stage, block) != (0, 0)))
            c_in = c_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def vgg19(hybrid):
    """With batch norm, as the paper trains it on CIFAR-10; the hybrid keeps the first nine convolutions dense."""
    layers = []
    c_in = 3
    number = 0
    for c_out, count in [(64, 2), (128, 2), (256, 4), (512, 4), (512, 4)]:
        for _ in range(count):
            number += 1
            layers += [conv(c_in, c_out, rank=c_out // 4 if hybrid and number >= 10 else 0), nn.BatchNorm2d(c_out),
                       nn.ReLU(inplace=True)]
            c_in = c_out
        layers.append(nn.MaxPool2d(2))

    def linear():
        if hybrid:
            return nn.Sequential(nn.Linear(512, 128, bias=False), nn.Linear(128, 512))
        return nn.Linear(512, 512)

    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), linear(), nn.ReLU(inplace=True), nn.Dropout(0.5),
                         linear(), nn.ReLU(inplace=True), nn.Linear(512, 10))


NETWORKS = {"resnet18": resnet18, "vgg19": vgg19}


class Training:
    """A network with its optimizer and random data; run() is one step."""

    def __init__(self, network, mode, batch, layout):
        torch.manual_seed(1)
        self.net = NETWORKS[network](mode == "hybrid").to(memory_format=LAYOUTS[layout])
        self.net.train()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.loss = nn.CrossEntropyLoss()
        self.x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=LAYOUTS[layout])
        self.labels = torch.arange(batch) % 10

    def run(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.net(self.x), self.labels).backward()
        self.optimizer.step()

    def parameters(self):
        return sum(p.numel() for p in self.net.parameters())


class Services:
    def __init__(self):
        self.kept = {}

    def info(self, _):
        config = torch.__config__.show()
        capability = next((line.split(":")[1].strip() for line in config.splitlines() if "capability usage" in line), "?")
        return {"version": torch.__version__, "threads": torch.get_num_threads(), "capability": capability}

    def step(self, request):
        key = tuple(request[k] for k in ("network", "mode", "batch", "layout"))
        if key not in self.kept:
            # Whatever belongs to another network makes room.
            self.kept = {k: v for k, v in self.kept.items() if k[0] == key[0]}
            self.kept[key] = Training(*key)
            self.kept[key].run()
            self.kept[key].run()
        training = self.kept[key]
        return {**timed(request, training.run), "parameters": training.parameters()}

    def conv(self, request):
        layout = LAYOUTS[request["layout"]]
        layer = conv(request["in"], request["out"], request.get("kernel", 3), request.get("stride", 1),
                     request.get("padding", 1), request.get("rank", 0)).to(memory_format=layout)
        x = torch.randn(request["batch"], request["in"], request["pixels"], request["pixels"])
        x = x.contiguous(memory_format=layout).requires_grad_()
        dy = torch.randn_like(layer(x))
        backward = request.get("directions", "all") != "forward"

        def forget():
            x.grad = None
            layer.zero_grad(set_to_none=True)

        def body():
            y = layer(x)
            if backward:
                y.backward(dy)

        return timed(request, body, forget)

    def svd(self, request):
        """svd_lowrank, with the largest excess of its squared truncation error over the best; or a thin SVD."""
        matrices = []
        with open(request["path"], "rb") as file:
            while header := file.read(12):
                rows, columns, rank = struct.unpack("iii", header)
                data = bytearray(file.read(4 * rows * columns))
                matrices.append((torch.frombuffer(data, dtype=torch.float32).reshape(rows, columns), rank))
        results = {}

        def body():
            for i, (matrix, rank) in enumerate(matrices):
                if request["method"] == "svd_lowrank":
                    results[i] = torch.svd_lowrank(matrix, q=rank)
                else:
                    results[i] = torch.linalg.svd(matrix, full_matrices=False)

        reply = timed(request, body)
        worst = 0.0
        for i, (matrix, rank) in enumerate(matrices):
            u, s, v = (t.double() for t in results[i])
            right = v[:, :rank].T if request["method"] == "svd_lowrank" else v[:rank]
            rest = matrix.double() - (u[:, :rank] * s[:rank]) @ right
            best = (torch.linalg.svdvals(matrix.double())[rank:] ** 2).sum().item()
            worst = max(worst, (rest ** 2).sum().item() / best - 1)
        return {**reply, "excess_error": worst}

    def memory(self, request):
        """MiB of resident memory that a network and ten steps add at most to what was there before. Ask a process
        that has done nothing else."""
        def resident(field):
            with open("/proc/self/status", encoding="ascii") as status:
                return next(int(line.split()[1]) for line in status if line.startswith(field + ":")) / 1024

        before = resident("VmRSS")
        training = Training(request["network"], request["mode"], request["batch"], request["layout"])
        for _ in range(10):
            training.run()
        return {"growth_mib": resident("VmHWM") - before}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    services = Services()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(services, request["work"])(request)
        except Exception as error:  # the other side decides what it means
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
