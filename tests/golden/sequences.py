# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cases of make.py: the layers of language models and translators, losses and optimizers, and small models."""
import math

import torch
from torch import nn

from cases import STEPS, Case, alone, case, hashed, linear, tensors

PADDING = 1


# ---------------------------------------------------------------------------------------------------------------- layers

class GateFactors(nn.Module):
    """One side of a low-rank LSTM: two factors for each of the four gates, one gate below the other."""

    def __init__(self, inputs, hidden, rank):
        super().__init__()
        self.down = nn.Parameter(torch.empty(4 * rank, inputs))
        self.up = nn.Parameter(torch.empty(4 * hidden, rank))

    def forward(self, x):
        gates = zip(self.down.chunk(4), self.up.chunk(4))
        return torch.cat([x @ down.T @ up.T for down, up in gates], -1)


class Lstm(nn.Module):
    """PyTorch's LSTM with one bias vector a gate; with ranks (of both sides), cells written out."""

    def __init__(self, inputs, hidden, ranks=None):
        super().__init__()
        self.low_rank = ranks is not None
        if self.low_rank:
            self.weight_ih = GateFactors(inputs, hidden, ranks[0])
        else:
            self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        if self.low_rank:
            self.weight_hh = GateFactors(hidden, hidden, ranks[1])
        else:
            self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))

    def forward(self, x, h, c):
        """x: steps x batch x inputs."""
        if not self.low_rank:
            weights = [self.weight_ih, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
            y, h, c = torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, self.training, False, False)
            return y, h[0], c[0]
        outputs = []
        for x_t in x:
            i, f, g, o = (self.weight_ih(x_t) + self.weight_hh(h) + self.bias).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), h, c


def attention(q, k, v, heads, hidden):
    """Of q, k, v: batch x tokens x (heads * depth); `hidden`: batch x queries x keys, True where a key is not seen."""
    def split(x):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = split(q) @ split(k).transpose(2, 3) / math.sqrt(q.shape[-1] // heads)
    weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return (weights @ split(v)).transpose(1, 2).flatten(2)


def hidden_keys(queries, lengths, keys, causal=False):
    """What queries do not see: keys past the end of their sequence; if causal, keys after the query."""
    key = torch.arange(keys)
    hidden = (key >= torch.tensor(lengths)[:, None])[:, None].expand(-1, queries, -1)
    return hidden | (key > torch.arange(queries)[:, None]) if causal else hidden


class MultiHeadAttention(nn.Module):
    """The Transformer's block: normalisation after the residual sum."""

    def __init__(self, model, heads, key, value, rank=None):
        super().__init__()
        self.heads = heads
        self.w_qs = linear(model, heads * key, rank, bias=False)
        self.w_ks = linear(model, heads * key, rank, bias=False)
        self.w_vs = linear(model, heads * value, rank, bias=False)
        self.fc = linear(heads * value, model, rank, bias=False)
        self.layer_norm = nn.LayerNorm(model, eps=1e-6)

    def attend(self, x, memory, hidden):
        return self.fc(attention(self.w_qs(x), self.w_ks(memory), self.w_vs(memory), self.heads, hidden))

    def forward(self, x, memory, hidden):
        return self.layer_norm(x + self.attend(x, memory, hidden))


class TorchAttention(MultiHeadAttention):
    """The dense block by PyTorch's own attention, for which values are as wide as keys and all heads as wide as x."""

    def attend(self, x, memory, hidden):
        mask = hidden.repeat_interleave(self.heads, 0)
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        y, _ = nn.functional.multi_head_attention_forward(
            x, memory, memory, x.shape[-1], self.heads, None, None, None, None, False, 0.0, self.fc.weight, None,
            attn_mask=mask, need_weights=False, use_separate_proj_weight=True, q_proj_weight=self.w_qs.weight,
            k_proj_weight=self.w_ks.weight, v_proj_weight=self.w_vs.weight)
        return y.transpose(0, 1)


class LowRankAttention(nn.Module):
    """Attention alone, with biases, as a host's layer has them."""

    def __init__(self, model, heads, key, value, rank):
        super().__init__()
        self.heads = heads
        self.query = linear(model, heads * key, rank)
        self.key = linear(model, heads * key, rank)
        self.value = linear(model, heads * value, rank)
        self.output = linear(heads * value, model, rank)

    def forward(self, x, memory, hidden):
        return self.output(attention(self.query(x), self.key(memory), self.value(memory), self.heads, hidden))


class FeedForward(nn.Module):
    def __init__(self, model, hidden, rank=None):
        super().__init__()
        self.w_1 = linear(model, hidden, rank)
        self.w_2 = linear(hidden, model, rank)
        self.layer_norm = nn.LayerNorm(model, eps=1e-6)

    def forward(self, x):
        return self.layer_norm(x + self.w_2(torch.relu(self.w_1(x))))


class PositionalEncoding(nn.Module):
    def __init__(self, width, positions):
        super().__init__()
        column = torch.arange(width, dtype=torch.float64)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] / 10000.0 ** (column // 2 * 2 / width)
        self.table = torch.where(column % 2 == 0, angle.sin(), angle.cos())

    def forward(self, x):
        return x + self.table[: x.shape[-2]]


# One module each, an input of rows, and what it is scaled by.
ROW_LAYERS = {
    "gelu": (nn.GELU, (5, 7), 4.0),
    "gelu_tanh": (lambda: nn.GELU(approximate="tanh"), (5, 7), 4.0),
    "tanh": (nn.Tanh, (5, 7), 4.0),
    "sigmoid": (nn.Sigmoid, (5, 7), 4.0),
    "layer_norm": (lambda: nn.LayerNorm(9, eps=1e-6), (2, 3, 9), 1.0),
    "layer_norm_eps": (lambda: nn.LayerNorm(9, eps=0.1), (4, 9), 1.0),
    "positional_encoding": (lambda: PositionalEncoding(7, 11), (2, 6, 7), 1.0),
    "feed_forward": (lambda: FeedForward(8, 13), (2, 3, 8), 1.0),
    "low_rank_feed_forward": (lambda: FeedForward(8, 13, 2), (2, 3, 8), 1.0),
    "low_rank_linear_no_bias": (lambda: linear(8, 5, 3, bias=False), (4, 8), 1.0),
}


@tensors("row_layers")
def row_layers():
    result = {}
    for name, (make, shape, scale) in ROW_LAYERS.items():
        inputs = {"input": scale * hashed("input", shape)}
        result.update(alone(name, make(), inputs, lambda layer, input: {"output": layer(input)}))
    return result


def lstm_in_segments(layer, input, h_before, c_before):
    """Three steps, then two from the state that they left; gradients go all the way back."""
    first, h, c = layer(input[:3], h_before, c_before)
    second, h, c = layer(input[3:], h, c)
    return {"output": torch.cat([first, second]), "h": h, "c": c}


@tensors("lstm")
def lstm():
    result = {}
    for name, ranks in ("lstm", None), ("low_rank_lstm", (2, 3)):
        inputs = {"input": hashed("input", (5, 3, 4)), "h_before": hashed("h_before", (3, 6)),
                  "c_before": hashed("c_before", (3, 6))}
        result.update(alone(name, Lstm(4, 6, ranks), inputs, lstm_in_segments))
    return result


@tensors("attention")
def attention_layers():
    """Queries: 2 sequences of 4 tokens; of a memory, 5 tokens each, of which 5 and 2 are real."""
    result = {}
    blocks = {
        "attention": lambda: TorchAttention(8, 2, 4, 4),
        "attention_wide_values": lambda: MultiHeadAttention(8, 2, 3, 5),
        "low_rank_attention": lambda: MultiHeadAttention(8, 2, 3, 5, 2),
        "bare_low_rank_attention": lambda: LowRankAttention(8, 2, 3, 5, 2),
    }
    for name, make in blocks.items():
        masks = {"all": hidden_keys(4, [4, 4], 4), "causal": hidden_keys(4, [4, 4], 4, True),
                 "padding": hidden_keys(4, [3, 1], 4)}
        if name.startswith("bare"):  # any pairs
            masks["allowed"] = hashed("allowed", (2, 4, 4)) > torch.tensor([1.0, 0.0, 0.0, 0.0])
        for kind, mask in masks.items():
            result.update(alone(f"{name}.{kind}", make(), {"input": hashed("input", (2, 4, 8))},
                                lambda layer, input: {"output": layer(input, input, mask)}))
        inputs = {"input": hashed("input", (2, 4, 8)), "memory": hashed("memory", (2, 5, 8))}
        result.update(alone(f"{name}.cross", make(), inputs, lambda layer, input, memory: {
            "output": layer(input, memory, hidden_keys(4, [5, 2], 5))}))
    return result


# -------------------------------------------------------------------------------------------- losses, tables, optimizers

def smoothed_nll(logits, targets, epsilon, padding=PADDING):
    """The sum over all targets but padding; epsilon is shared out among the wrong classes, as in the paper's code."""
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, targets[:, None])[:, 0]
    others = (logs.sum(-1) - own) / (logits.shape[-1] - 1)
    return -((1 - epsilon) * own + epsilon * others)[targets != padding].sum()


TARGETS = [3, 1, 0, 10, 1, 5, 5, 2, 9]


@tensors("token_loss")
def token_loss():
    targets = torch.tensor(TARGETS)
    real = int((targets != PADDING).sum())
    cross_entropy = nn.functional.cross_entropy
    losses = {
        "nll": lambda z: cross_entropy(z, targets),
        "nll_padding": lambda z: cross_entropy(z, targets, ignore_index=PADDING),
        "smoothed_sum": lambda z: smoothed_nll(z, targets, 0.1),
        "smoothed_mean": lambda z: smoothed_nll(z, targets, 0.1) / real,
        "smoothed_all_classes": lambda z: cross_entropy(z, targets, ignore_index=PADDING, label_smoothing=0.1),
    }
    result = {}
    for name, loss in losses.items():
        z = (6.0 * hashed("logits", (len(TARGETS), 11))).requires_grad_()
        value = loss(z)
        value.backward()
        result.update({f"{name}.loss": value, f"{name}.gradient": z.grad})
    return result


@tensors("embedding")
def embedding():
    tokens = torch.tensor([4, 0, 4, PADDING, 2, 4, 6, PADDING, 10])
    table = nn.Embedding(11, 7, padding_idx=PADDING)
    result = alone("embedding", table, {}, lambda table: {"output": table(tokens)})

    # Logits by the same table, and all gradients of their loss.
    table.weight.grad = None
    bias = hashed("bias", (11,)).requires_grad_()
    rows = table(tokens) + hashed("shift", (9, 7))
    rows.retain_grad()
    logits = 0.5 * rows @ table.weight.T + bias
    loss = smoothed_nll(logits, torch.tensor(TARGETS), 0.1)
    loss.backward()
    tied = {"logits": logits, "loss": loss, "rows_gradient": rows.grad, "gradient.weight": table.weight.grad,
            "gradient.bias": bias.grad}
    result.update({f"tied.{name}": tensor for name, tensor in tied.items()})
    return result


class LowRankEmbedding(nn.Module):
    """A thin table, then a product."""

    def __init__(self, vocabulary, width, rank):
        super().__init__()
        self.down = nn.Embedding(vocabulary, rank, padding_idx=PADDING)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, tokens):
        return self.up(self.down(tokens))


@tensors("low_rank_embedding")
def low_rank_embedding():
    tokens = torch.tensor([4, 0, 4, PADDING, 2, 4, 6, PADDING, 10])
    table = LowRankEmbedding(11, 7, 3)
    result = alone("embedding", table, {}, lambda table: {"output": table(tokens)})

    # Logits by the product of the same factors, and all gradients of their loss.
    table.zero_grad(set_to_none=True)
    bias = hashed("bias", (11,)).requires_grad_()
    rows = table(tokens) + hashed("shift", (9, 7))
    rows.retain_grad()
    logits = 0.5 * rows @ (table.down.weight @ table.up.weight.T).T + bias
    loss = smoothed_nll(logits, torch.tensor(TARGETS), 0.1)
    loss.backward()
    tied = {"logits": logits, "loss": loss, "rows_gradient": rows.grad, "gradient.down.weight": table.down.weight.grad,
            "gradient.up.weight": table.up.weight.grad, "gradient.bias": bias.grad}
    result.update({f"tied.{name}": tensor for name, tensor in tied.items()})
    return result


@tensors("optimizers")
def optimizers():
    """Five steps of 40 numbers, whose gradients are given."""
    kinds = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.98), eps=1e-4),
        "adam_decay": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, weight_decay=0.1),
    }
    result = {}
    for name, make in kinds.items():
        p = nn.Parameter(hashed("values", (40,)))
        optimizer = make([p])
        for step in range(5):
            p.grad = hashed(f"gradient {step}", (40,))
            optimizer.step()
        state = optimizer.state[p]
        result.update({f"{name}.values": p, f"{name}.first": state["exp_avg"], f"{name}.second": state["exp_avg_sq"]})
    return result


@tensors("clipping")
def clipping():
    result = {}
    for name, largest in ("clipped", 0.25), ("not_clipped", 100.0):
        p = nn.Parameter(hashed("values", (40,)))
        p.grad = hashed("gradient", (40,))
        result[f"{name}.norm"] = nn.utils.clip_grad_norm_([p], largest)
        result[f"{name}.gradient"] = p.grad
    return result


# ---------------------------------------------------------------------------------------------------------------- models

class LstmLanguageModel(nn.Module):
    """`ranks`: of each layer, None for a dense one."""

    def __init__(self, vocabulary, width, ranks):
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.ModuleList(Lstm(width, width, rank) for rank in ranks)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, state):
        x, after = self.encoder(tokens), []
        for layer, (h, c) in zip(self.rnn, state):
            x, h, c = layer(x, h, c)
            after.append((h.detach(), c.detach()))
        return self.decoder(x), after


def language_model_case(ranks):
    """Three streams of 10 tokens over and over, in segments of 5 steps; each segment starts from the state that the last
    one left."""
    vocabulary, width, steps, batch = 23, 12, 5, 3
    text = ((hashed("text", (10, batch)) + 1) * (vocabulary / 2)).floor().long().repeat(STEPS, 1)
    state = [(torch.zeros(batch, width).double(),) * 2 for _ in ranks]
    segment = 0

    def step(net, _):
        nonlocal state, segment
        begin = segment * steps
        logits, state = net(text[begin : begin + steps], state)
        segment += 1
        logits = logits.flatten(0, 1)
        return {"logits": logits}, nn.functional.cross_entropy(logits, text[begin + 1 : begin + steps + 1].flatten())
    return Case(LstmLanguageModel(vocabulary, width, ranks), {}, step, lambda p: torch.optim.SGD(p, lr=6.0), clip=0.25)


@case("lstm_lm")
def lstm_lm():
    return language_model_case([None, None])


@case("lstm_lm_hybrid")
def lstm_lm_hybrid():
    return language_model_case([None, (3, 2)])


@case("lstm_lm_lowrank")
def lstm_lm_lowrank():
    return language_model_case([(3, 3), (3, 3)])


class TransformerLayer(nn.Module):
    def __init__(self, shape, hidden, decoder, rank):
        super().__init__()
        self.slf_attn = MultiHeadAttention(*shape, rank)
        if decoder:
            self.enc_attn = MultiHeadAttention(*shape, rank)
        self.pos_ffn = FeedForward(shape[0], hidden, rank)


class TransformerStack(nn.Module):
    def __init__(self, name, vocabulary, shape, hidden, ranks):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Embedding(vocabulary, shape[0], padding_idx=PADDING))
        self.position_enc = PositionalEncoding(shape[0], 12)
        self.layer_norm = nn.LayerNorm(shape[0], eps=1e-6)
        self.layer_stack = nn.ModuleList(
            TransformerLayer(shape, hidden, name == "trg_word_emb", rank) for rank in ranks)

    def embed(self, tokens):
        return self.layer_norm(self.position_enc(getattr(self, self.name)(tokens)))


class Transformer(nn.Module):
    """`ranks`: of the layers of each stack, None for a dense one. Padding is masked as a key; what is made of it as a
    query is left out at the end."""

    def __init__(self, vocabulary, shape, hidden, ranks):
        super().__init__()
        self.encoder = TransformerStack("src_word_emb", vocabulary, shape, hidden, ranks)
        self.decoder = TransformerStack("trg_word_emb", vocabulary, shape, hidden, ranks)
        self.trg_word_prj = nn.Linear(shape[0], vocabulary, bias=False)
        self.decoder.trg_word_emb.weight = self.encoder.src_word_emb.weight
        self.trg_word_prj.weight = self.encoder.src_word_emb.weight

    def forward(self, source, target):
        source_lengths, target_lengths = ([int((row != PADDING).sum()) for row in ids] for ids in (source, target))
        longest = source.shape[1]
        x = self.encoder.embed(source)
        for layer in self.encoder.layer_stack:
            x = layer.pos_ffn(layer.slf_attn(x, x, hidden_keys(longest, source_lengths, longest)))
        memory = x
        x = self.decoder.embed(target)
        queries = target.shape[1]
        for layer in self.decoder.layer_stack:
            x = layer.slf_attn(x, x, hidden_keys(queries, target_lengths, queries, True))
            x = layer.enc_attn(x, memory, hidden_keys(queries, source_lengths, longest))
            x = layer.pos_ffn(x)
        return self.trg_word_prj(x[target != PADDING]) * x.shape[-1] ** -0.5


def padded(sentences):
    longest = max(len(sentence) for sentence in sentences)
    return torch.tensor([sentence + [PADDING] * (longest - len(sentence)) for sentence in sentences])


def transformer_case(ranks):
    source = padded([[4, 5, 6, 3], [7, 3], [8, 9, 10, 11, 12, 28, 3], [14]])
    target = padded([[2, 5, 5, 20], [2, 12, 4, 6, 0, 27], [2], [2, 25, 13]])
    after = padded([[5, 5, 20, 3], [12, 4, 6, 0, 27, 3], [3], [25, 13, 3]])

    def step(net, _):
        logits = net(source, target)
        return {"logits": logits}, smoothed_nll(logits, after[target != PADDING], 0.1)
    return Case(Transformer(29, (16, 4, 4, 5), 32, ranks), {}, step,
                lambda p: torch.optim.Adam(p, lr=0.002, betas=(0.9, 0.98), eps=1e-4))


@case("transformer")
def transformer():
    return transformer_case([None, None])


@case("transformer_hybrid")
def transformer_hybrid():
    return transformer_case([None, 4])
