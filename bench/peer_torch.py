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


def precision(request):
    return getattr(torch, request.get("precision", "float"))


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


def resnet18(hybrid, width=64):
    """As the paper trains it on CIFAR-10: no batch norm after the stem; the hybrid keeps the first block dense."""
    layers = [conv(3, width), nn.ReLU(inplace=True)]
    c_in = width
    for stage, c_out in enumerate([width, 2 * width, 4 * width, 8 * width]):
        for block in range(2):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(c_in, c_out, stride, hybrid and (stage, block) != (0, 0)))
            c_in = c_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def vgg19(hybrid, width=64):
    """With batch norm, as the paper trains it on CIFAR-10; the hybrid keeps the first nine convolutions dense."""
    layers = []
    c_in = 3
    number = 0
    for c_out, count in [(width, 2), (2 * width, 2), (4 * width, 4), (8 * width, 4), (8 * width, 4)]:
        for _ in range(count):
            number += 1
            layers += [conv(c_in, c_out, rank=c_out // 4 if hybrid and number >= 10 else 0), nn.BatchNorm2d(c_out),
                       nn.ReLU(inplace=True)]
            c_in = c_out
        layers.append(nn.MaxPool2d(2))

    hidden = 8 * width

    def linear():
        if hybrid:
            return nn.Sequential(nn.Linear(hidden, hidden // 4, bias=False), nn.Linear(hidden // 4, hidden))
        return nn.Linear(hidden, hidden)

    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), linear(), nn.ReLU(inplace=True), nn.Dropout(0.5),
                         linear(), nn.ReLU(inplace=True), nn.Linear(hidden, 10))


def mobile_blocks(hybrid):
    """Two blocks of MobileNet and a classifier; the hybrid has its 1x1 convolutions in factors."""
    layers = []
    for c_in, c_out, stride in [(128, 256, 1), (256, 256, 2)]:
        layers += [nn.Conv2d(c_in, c_in, 3, stride, 1, groups=c_in, bias=False), nn.BatchNorm2d(c_in), nn.ReLU(inplace=True),
                   conv(c_in, c_out, 1, padding=0, rank=min(c_in, c_out) // 4 if hybrid else 0), nn.BatchNorm2d(c_out),
                   nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class LowRankLSTM(nn.Module):
    """A layer of factors, as one writes it for speed: gates i, f, o, g, so that one call does three sigmoids; the input
    side of all steps at once; all gates' second factors in one batched product."""

    def __init__(self, width, rank):
        super().__init__()
        bound = (6 / (width + rank)) ** 0.5
        for side in ["ih", "hh"]:
            self.register_parameter(f"down_{side}", nn.Parameter(torch.empty(width, 4 * rank).uniform_(-bound, bound)))
            self.register_parameter(f"up_{side}", nn.Parameter(torch.empty(4, rank, width).uniform_(-bound, bound)))
        self.bias = nn.Parameter(torch.zeros(4, 1, width))
        self.rank = rank

    def factors(self, x, down):
        """4 x rows x rank"""
        return (x @ down).view(x.shape[0], 4, self.rank).transpose(0, 1)

    def forward(self, x, state):
        steps, batch, width = x.shape
        h, c = state
        z = torch.baddbmm(self.bias, self.factors(x.reshape(steps * batch, width), self.down_ih), self.up_ih)
        outputs = []
        for before in z.split(batch, dim=1):
            gates = torch.baddbmm(before, self.factors(h, self.down_hh), self.up_hh)
            i, f, o = torch.sigmoid(gates[:3])
            c = f * c + i * torch.tanh(gates[3])
            h = o * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


class LanguageModel(nn.Module):
    """The paper's, with the state of every layer carried over."""

    def __init__(self, mode, vocabulary=33278, width=1500):
        super().__init__()
        layers = 2
        self.drop = nn.Dropout(0.65)
        self.encoder = nn.Embedding(vocabulary, width)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        if mode == "dense":
            self.rnn = nn.ModuleList([nn.LSTM(width, width, layers, dropout=0.65)])
        else:
            self.rnn = nn.ModuleList([LowRankLSTM(width, width // 4) for _ in range(layers)])
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight
        self.state_shape = [layers, 0, width] if mode == "dense" else [0, width]

    def zeros(self, batch, device="cpu"):
        shape = [n or batch for n in self.state_shape]
        return [tuple(torch.zeros(shape, device=device) for _ in range(2)) for _ in self.rnn]

    def forward(self, tokens, states):
        x = self.drop(self.encoder(tokens))
        after = []
        for layer, state in zip(self.rnn, states):
            x, state = layer(x, state)
            x = self.drop(x)
            after.append(tuple(t.detach() for t in state))
        return self.decoder(x), after


def linear(c_in, c_out, low_rank, bias=False):
    if not low_rank:
        return nn.Linear(c_in, c_out, bias)
    rank = min(c_in, c_out) // 4
    return nn.Sequential(nn.Linear(c_in, rank, bias=False), nn.Linear(rank, c_out, bias))


class Attention(nn.Module):
    fused = False  # by PyTorch's own attention

    def __init__(self, low_rank, width=512, heads=8):
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs, self.fc = (linear(width, width, low_rank) for _ in range(4))
        self.heads = heads
        self.drop_weights, self.drop = nn.Dropout(0.1), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x, memory, mask):
        def split(rows):
            return rows.view(*rows.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.w_qs(x)), split(self.w_ks(memory)), split(self.w_vs(memory))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask,
                                                           dropout_p=0.1 if self.training else 0.0)
            return self.norm(x + self.drop(self.fc(y.transpose(1, 2).flatten(2))))
        weights = (q / q.shape[-1] ** 0.5) @ k.transpose(2, 3)
        weights = self.drop_weights(torch.softmax(weights.masked_fill(mask, -1e9), dim=-1))
        return self.norm(x + self.drop(self.fc((weights @ v).transpose(1, 2).flatten(2))))


class FeedForward(nn.Module):
    def __init__(self, low_rank, width=512, hidden=2048):
        super().__init__()
        self.w_1, self.w_2 = linear(width, hidden, low_rank, True), linear(hidden, width, low_rank, True)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x):
        return self.norm(x + self.drop(self.w_2(torch.relu(self.w_1(x)))))


class Translator(nn.Module):
    """The paper's Transformer: one table for both languages and the output; the first layer of each stack stays dense."""

    def __init__(self, mode, vocabulary=9521, width=512, padding=1, hidden=2048, layers=6, heads=8):
        super().__init__()
        low_rank = [mode == "lowrank" or (mode == "hybrid" and layer > 0) for layer in range(layers)]
        self.table = nn.Embedding(vocabulary, width, padding_idx=padding)
        nn.init.xavier_uniform_(self.table.weight)
        self.register_buffer("positions", torch.randn(1, 200, width))
        self.drop = nn.Dropout(0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        def attention(r):
            return Attention(r, width, heads)

        self.encoder = nn.ModuleList(nn.ModuleList([attention(r), FeedForward(r, width, hidden)]) for r in low_rank)
        self.decoder = nn.ModuleList(nn.ModuleList([attention(r), attention(r), FeedForward(r, width, hidden)])
                                     for r in low_rank)
        self.padding = padding
        self.scale = width ** -0.5

    def embed(self, tokens, norm):
        return norm(self.drop(self.table(tokens) + self.positions[:, :tokens.shape[1]]))

    def forward(self, source, target):
        source_mask, target_mask = ((t == self.padding)[:, None, None] for t in (source, target))
        length = target.shape[1]
        target_mask = target_mask | torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        memory = self.embed(source, self.norms[0])
        for attention, feed_forward in self.encoder:
            memory = feed_forward(attention(memory, memory, source_mask))
        x = self.embed(target, self.norms[1])
        for attention, cross, feed_forward in self.decoder:
            x = feed_forward(cross(attention(x, x, target_mask), memory, source_mask))
        return (x * self.scale) @ self.table.weight.T


NETWORKS = {"resnet18": resnet18, "vgg19": vgg19, "mobile_blocks": mobile_blocks}
IMAGES = {"mobile_blocks": (128, 28, 28)}  # of the others: 3 x 32 x 32


class Training:
    """A network over images with its optimizer and random data; run() is one step. Modes that end with _bf16 compute under
    autocast; parameters stay fp32."""

    def __init__(self, network, mode, batch, layout):
        torch.manual_seed(1)
        self.bf16 = mode.endswith("_bf16")
        self.net = NETWORKS[network](mode.startswith("hybrid")).to(memory_format=LAYOUTS[layout])
        self.net.train()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.loss = nn.CrossEntropyLoss()
        self.x = torch.randn(batch, *IMAGES.get(network, (3, 32, 32))).contiguous(memory_format=LAYOUTS[layout])
        self.labels = torch.arange(batch) % 10

    def run(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.loss(self.net(self.x), self.labels)
        loss.backward()
        self.optimizer.step()

    def parameters(self):
        return sum(p.numel() for p in self.net.parameters())


class LanguageTraining(Training):
    """20 sequences of 35 tokens, the gradient clipped, SGD."""

    def __init__(self, mode, batch):
        torch.manual_seed(1)
        self.bf16 = mode.endswith("_bf16")
        self.net = LanguageModel(mode.removesuffix("_bf16"))
        self.net.train()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.tokens, self.targets = (torch.randint(33278, (35, batch)) for _ in range(2))
        self.states = self.net.zeros(batch)

    def run(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits, self.states = self.net(self.tokens, self.states)
            loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), self.targets.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.25)
        self.optimizer.step()


class TranslatorTraining(Training):
    """Pairs of 30 + 30 tokens, label smoothing, Adam."""

    def __init__(self, mode, batch):
        torch.manual_seed(1)
        self.bf16 = mode.endswith("_bf16")
        self.net = Translator(mode.removesuffix("_bf16"))
        self.net.train()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-5, betas=(0.9, 0.98), eps=1e-9)
        self.source, self.target, self.next = (torch.randint(2, 9521, (batch, 30)) for _ in range(3))

    def run(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.net(self.source, self.target)
            loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), self.next.view(-1), label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()


class Inference:
    """A network over images that is done with training; frozen: traced, its batch norms folded, its layers fused."""

    def __init__(self, network, mode, batch, frozen):
        torch.manual_seed(1)
        layout = torch.channels_last
        self.net = NETWORKS[network](mode == "hybrid").to(memory_format=layout).eval()
        self.x = torch.randn(batch, *IMAGES.get(network, (3, 32, 32))).contiguous(memory_format=layout)
        if frozen:
            with torch.no_grad():
                self.net = torch.jit.optimize_for_inference(torch.jit.trace(self.net, self.x))

    def run(self):
        with torch.inference_mode():
            self.net(self.x)


def make_training(network, mode, batch, layout):
    if network == "lstm":
        return LanguageTraining(mode, batch)
    if network == "transformer":
        return TranslatorTraining(mode, batch)
    return Training(network, mode, batch, layout)


class Services:
    def __init__(self):
        self.kept = {}

    def info(self, _):
        config = torch.__config__.show()
        capability = next((line.split(":")[1].strip() for line in config.splitlines() if "capability usage" in line), "?")
        return {"version": torch.__version__, "threads": torch.get_num_threads(), "capability": capability}

    def step(self, request):
        key = tuple(request.get(k) for k in ("network", "mode", "batch", "layout"))
        if key not in self.kept:
            # Whatever belongs to another network makes room.
            self.kept = {k: v for k, v in self.kept.items() if k[0] == key[0]}
            self.kept[key] = make_training(*key)
            self.kept[key].run()
            self.kept[key].run()
        training = self.kept[key]
        return {**timed(request, training.run), "parameters": training.parameters()}

    def infer(self, request):
        key = ("infer", *(request[k] for k in ("network", "mode", "batch", "frozen")))
        if key not in self.kept:
            self.kept[key] = Inference(*key[1:])
            for _ in range(3):  # the first calls of a traced network compile it
                self.kept[key].run()
        return timed(request, self.kept[key].run)

    def gemm(self, request):
        m, n, k = (request[size] for size in "mnk")
        a = torch.randn(k, m).T if request["transposed"] else torch.randn(m, k)
        a, b = a.to(precision(request)), torch.randn(k, n).to(precision(request))
        c = torch.empty(m, n, dtype=precision(request))
        return timed(request, lambda: torch.mm(a, b, out=c))

    def conv(self, request):
        layout = LAYOUTS[request["layout"]]
        layer = conv(request["in"], request["out"], request.get("kernel", 3), request.get("stride", 1),
                     request.get("padding", 1), request.get("rank", 0)).to(precision(request), memory_format=layout)
        x = torch.randn(request["batch"], request["in"], request["pixels"], request["pixels"])
        x = x.to(precision(request), memory_format=layout).requires_grad_()
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
        training = make_training(request["network"], request["mode"], request["batch"], request.get("layout"))
        for _ in range(10):
            training.run()
        return {"growth_mib": resident("VmHWM") - before}


def serve(services):
    """Answers a request a line until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(services, request["work"])(request)
        except Exception as error:  # the other side decides what it means
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    serve(Services())


if __name__ == "__main__":
    main()
