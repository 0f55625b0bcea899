#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""peer_torch_gpu.py [--device cuda]

PyTorch's side of bench/gpu_step: answers requests for training steps, a JSON object a line. The networks are those of
peer_torch.py, and ResNet-50. Exit status 77 where there is no such device.

Ways to run a step ("variant" of a request): `eager`; `captured`, eager with the whole step in one CUDA graph; `compiled`,
torch.compile with mode="reduce-overhead", which replays CUDA graphs; `autotuned`, with mode="max-autotune". All of them
channels last, with cuDNN's search for the fastest algorithms and fused optimizers.
"""
import argparse
import contextlib
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore")
# What one process has compiled another loads (bench/gpu_step compiles ahead).
for cache in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
    os.environ.setdefault(cache, "1")
import torch  # noqa: E402
from torch import nn  # noqa: E402

import peer_torch as peers  # noqa: E402

PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILED = {"compiled": "reduce-overhead", "autotuned": "max-autotune"}


def conv(c_in, c_out, kernel, stride, low_rank):
    rank = min(c_out, c_in * kernel * kernel) // 4 if low_rank else 0
    return peers.conv(c_in, c_out, kernel, stride, kernel // 2, rank)


class Bottleneck(nn.Module):
    def __init__(self, c_in, inner, c_out, stride, low_rank):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.branch = nn.Sequential(conv(c_in, inner, 1, 1, low_rank), nn.BatchNorm2d(inner), self.relu,
                                    conv(inner, inner, 3, stride, low_rank), nn.BatchNorm2d(inner), self.relu,
                                    conv(inner, c_out, 1, 1, low_rank), nn.BatchNorm2d(c_out))
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(conv(c_in, c_out, 1, stride, low_rank), nn.BatchNorm2d(c_out))

    def forward(self, x):
        return self.relu(self.branch(x) + self.shortcut(x))


def resnet50(hybrid, width=64, classes=1000):
    """As torchvision's; the hybrid has the last stage factorized, shortcut included."""
    layers = [conv(3, width, 7, 2, False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, blocks in enumerate([3, 4, 6, 3]):
        inner = width << stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, inner, 4 * inner, stride, hybrid and stage == 3))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Images:
    def __init__(self, request, device):
        hybrid, tiny, batch = request["mode"] == "hybrid", request.get("tiny", False), request["batch"]
        width, side, classes = (8, 32, 10) if tiny else (64, 32, 10)
        if request["network"] == "resnet50":
            side, classes = (32, 10) if tiny else (224, 1000)
            self.net = resnet50(hybrid, width, classes)
        elif request["network"] == "resnet18":
            side = 16 if tiny else 32
            self.net = peers.resnet18(hybrid, width)
        else:
            self.net = peers.vgg19(hybrid, width)
        self.net.to(device, memory_format=torch.channels_last)
        self.x = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
        self.labels = torch.arange(batch, device=device) % classes
        self.make_optimizer = lambda **more: torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9,
                                                             weight_decay=1e-4, **more)

    def loss(self, net):
        return nn.functional.cross_entropy(net(self.x), self.labels)

    def after_backward(self):
        pass


class Language:
    def __init__(self, request, device):
        tiny, batch = request.get("tiny", False), request["batch"]
        vocabulary, width, steps = (50, 16, 4) if tiny else (33278, 1500, 35)
        mode = "dense" if request["mode"] == "dense" else "lowrank"
        self.net = peers.LanguageModel(mode, vocabulary, width)
        self.net.to(device)
        self.tokens, self.targets = (torch.randint(vocabulary, (steps, batch), device=device) for _ in range(2))
        self.states = self.net.zeros(batch, device)
        self.make_optimizer = lambda **more: torch.optim.SGD(self.net.parameters(), lr=0.1, **more)

    def loss(self, net):
        logits, self.after = net(self.tokens, self.states)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), self.targets.view(-1))

    def after_backward(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.25)
        for kept, new in zip(self.states, self.after):  # in place, so that a graph finds it where it was
            for a, b in zip(kept, new):
                a.copy_(b)


class Translation:
    def __init__(self, request, device):
        tiny, batch = request.get("tiny", False), request["batch"]
        more = {"vocabulary": 40, "width": 16, "hidden": 32, "layers": 2, "heads": 2} if tiny else {}
        vocabulary, length = (40, 5) if tiny else (9521, 30)
        self.net = peers.Translator(request["mode"], **more)
        self.net.to(device)
        self.source, self.target, self.next = (torch.randint(2, vocabulary, (batch, length), device=device)
                                               for _ in range(3))
        self.make_optimizer = lambda **more: torch.optim.Adam(self.net.parameters(), lr=1e-5, betas=(0.9, 0.98),
                                                              eps=1e-9, **more)

    def loss(self, net):
        logits = net(self.source, self.target)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), self.next.view(-1),
                                           label_smoothing=0.1)

    def after_backward(self):
        pass


class Training:
    """A step of one of the above, in one of the ways."""

    def __init__(self, request, device):
        torch.manual_seed(1)
        precision, self.variant = request.get("precision", "fp32"), request.get("variant", "eager")
        self.device = device
        self.dtype = PRECISIONS[precision]
        for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
            backend.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.benchmark = True
        kinds = {"lstm": Language, "transformer": Translation}
        self.work = kinds.get(request["network"], Images)(request, device)
        self.net = self.work.net
        self.net.train()
        self.optimizer = self.fastest_optimizer()
        self.scaler = torch.cuda.amp.GradScaler() if precision == "fp16" and device == "cuda" else None
        self.called = self.net
        if self.variant in COMPILED:
            if not hasattr(torch, "compile"):
                raise RuntimeError("this PyTorch has no torch.compile")
            torch._dynamo.reset()
            self.called = torch.compile(self.net, mode=COMPILED[self.variant])
        self.graph = None
        if self.variant == "captured":
            self.capture()

    def fastest_optimizer(self):
        """Of what this version of PyTorch has for the device."""
        captured = {"capturable": True} if self.variant == "captured" else {}
        for more in ({"fused": True, **captured}, {"fused": True}, {"foreach": True, **captured}, {"foreach": True}, {}):
            if "fused" in more and self.device != "cuda":
                continue
            try:
                return self.work.make_optimizer(**more)
            except (TypeError, RuntimeError, ValueError):
                continue
        raise RuntimeError("no optimizer")

    def autocast(self):
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.work.loss(self.called)
        if self.scaler is None:
            loss.backward()
            self.work.after_backward()
            self.optimizer.step()
            return
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.work.after_backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def capture(self):
        if self.device != "cuda" or self.scaler is not None:
            raise RuntimeError("the whole step can be captured on a device only, and without loss scaling")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph

    def run(self):
        if self.variant in COMPILED and hasattr(torch, "compiler"):
            torch.compiler.cudagraph_mark_step_begin()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()


class Services:
    def __init__(self, device):
        self.device = device
        self.kept = {}
        peers.Attention.fused = hasattr(nn.functional, "scaled_dot_product_attention")

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def machine(self, _):
        found = {"torch": torch.__version__}
        if self.device == "cuda":
            found.update(device=torch.cuda.get_device_name(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
        return found

    def forget(self, _):
        self.kept = {}
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def step(self, request):
        key = tuple(request.get(k) for k in ("network", "mode", "batch", "precision", "variant", "tiny"))
        if key not in self.kept:
            # Whatever belongs to another row of the table makes room.
            self.kept = {k: v for k, v in self.kept.items() if k[:4] == key[:4]}
            self.kept[key] = Training(request, self.device)
            for _ in range(request.get("warm_up", 8)):
                self.kept[key].run()
        training = self.kept[key]
        steps = request.get("steps", 20)
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            training.run()
        self.wait()
        seconds = (time.perf_counter() - start) / steps
        # nn.LSTM has two biases that only ever act as their sum.
        parameters = sum(p.numel() for name, p in training.net.named_parameters() if "bias_hh" not in name)
        return {"ms": seconds * 1e3, "parameters": parameters}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("peer_torch_gpu.py: no CUDA device for this PyTorch: nothing is measured", file=sys.stderr)
        sys.exit(77)
    peers.serve(Services(device))


if __name__ == "__main__":
    main()
