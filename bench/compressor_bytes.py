# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What each compressor sends in a step of the ResNet-18 for CIFAR-10, to the byte.

A message is a collective with its size. `payload` is what a rank hands to collectives, `sent` what rank 0 of p sends:
a sum of n bytes 2 (p - 1) / p n by a ring, a gather of a block of n bytes (p - 1) n, and a two-hop exchange the codes of the
other ranks' stripes, then its own stripe's code p - 1 times. `collectives` names what is called, in order, with bytes.
"""
import bisect
import dataclasses
import math


def resnet18(mode):
    """Shapes of all parameters, out x in x height x width, out x in, or (length,). `hybrid`: all but the first block, the
    shortcuts and the last layer factorized, a quarter of the outputs as rank."""
    shapes, inputs = [(64, 3, 3, 3)], 64
    for stage, planes in enumerate([64, 128, 256, 512]):
        for block in range(2):
            for channels in (inputs, planes):
                if mode == "hybrid" and (stage, block) != (0, 0):
                    shapes += [(planes // 4, channels, 3, 3), (planes, planes // 4, 1, 1)]
                else:
                    shapes.append((planes, channels, 3, 3))
                shapes += [(planes,), (planes,)]
            if block == 0 and stage > 0:
                shapes += [(planes, inputs, 1, 1), (planes,), (planes,)]
            inputs = planes
    return [*shapes, (10, 512), (10,)]


def count(shape):
    return math.prod(shape)


def matrices(shapes):
    return [s for s in shapes if len(s) > 1]


def total(shapes):
    return sum(map(count, shapes))


# --- collectives ---

@dataclasses.dataclass(frozen=True)
class Sum:
    size: float

    def payload(self, ranks):
        return self.size

    def sent(self, ranks):
        return 2 * (ranks - 1) / ranks * self.size

    def collectives(self, ranks):
        return [("sum", self.size)]


@dataclasses.dataclass(frozen=True)
class Gather:
    block: float
    lengths: bool = False  # whether only its own rank knows a block's length: lengths travel first, 8 bytes a rank

    def payload(self, ranks):
        return self.block

    def sent(self, ranks):
        return (ranks - 1) * (self.block + 8 * self.lengths)

    def collectives(self, ranks):
        return [("lengths", 8)] * self.lengths + [("gather", self.block)]


class TwoHop:
    """`first`(elements, pieces) and `second`(elements, pieces, ranks): bytes of the code of a stripe that contains `pieces`
    pieces of tensors. A stripe has 32 ceil(N / (32 p)) elements, the last ones what is left. `shapes` are in the order of execution,
    which the arena of gradients reverses (nn/parameter_store.hpp): stripe 0 has the last layers."""

    def __init__(self, shapes, first, second):
        self.ends = []
        for shape in reversed(shapes):
            self.ends.append((self.ends[-1] if self.ends else 0) + count(shape))
        self.first, self.second = first, second

    def stripe(self, rank, ranks):
        elements = self.ends[-1]
        size = 32 * math.ceil(elements / (32 * ranks))
        begin, end = min(rank * size, elements), min((rank + 1) * size, elements)
        pieces = bisect.bisect_left(self.ends, end) - bisect.bisect_right(self.ends, begin) + 1 if end > begin else 0
        return end - begin, pieces

    def own(self, ranks):
        return self.second(*self.stripe(0, ranks), ranks)

    def payload(self, ranks):
        return sum(self.first(*self.stripe(r, ranks)) for r in range(ranks)) + self.own(ranks)

    def to_others(self, ranks):
        return sum(self.first(*self.stripe(r, ranks)) for r in range(1, ranks))

    def sent(self, ranks):
        return self.to_others(ranks) + (ranks - 1) * self.own(ranks)

    def collectives(self, ranks):
        """The blocks of the first hop have the mean length of those that rank 0 sends."""
        return [("blocks", self.to_others(ranks) / max(1, ranks - 1)), ("gather", self.own(ranks))]


def payload(messages, ranks):
    return sum(m.payload(ranks) for m in messages)


def sent(messages, ranks):
    return sum(m.sent(ranks) for m in messages)


def collectives(messages):
    names = {Sum: "sum", Gather: "gather", TwoHop: "two-hop"}
    return " + ".join(dict.fromkeys(names[type(m)] for m in messages))


# --- systems: the messages of a step, by the shapes ---

def whole(shapes, bytes_each=4):
    return [Sum(bytes_each * total(shapes))]


def power_sgd(shapes, rank):
    """Both factors of each matrix that they make smaller, the rest as it is: a sum of the P (out x r) and the rest, then one of
    the Q."""
    first = second = 0
    for shape in shapes:
        rows, columns = shape[0], count(shape) // shape[0]
        r = min(rank, rows, columns)
        is_smaller = len(shape) > 1 and r * (rows + columns) < rows * columns
        first += r * rows if is_smaller else count(shape)
        second += r * columns if is_smaller else 0
    return [Sum(4 * first), Sum(4 * second)]


def bit_words(elements):
    return 4 * math.ceil(elements / 32)


def signum(shapes):
    return [Gather(bit_words(total(shapes)))]


def signum_two_hop(shapes):
    """A sign may be a tie if the number of ranks is even: two bits."""
    return [TwoHop(shapes, lambda n, pieces: bit_words(n), lambda n, pieces, ranks: (2 - ranks % 2) * bit_words(n))]


def entries(shape, ratio):
    return max(1, math.floor(ratio * count(shape)))


def top_k(shapes, ratio):
    return [Gather(8 * sum(entries(s, ratio) for s in shapes))]


def random_k(shapes, ratio):
    return [Sum(4 * sum(entries(s, ratio) for s in shapes))]


def dgc(shapes, ratio):
    return [Sum(4 * (total(shapes) - total(matrices(shapes)))),
            Gather(8 * sum(math.ceil(ratio * count(s)) for s in matrices(shapes)))]


def ef_sign(shapes):
    return [Gather(bit_words(total(shapes)) + 4 * len(shapes))]


def double_squeeze(shapes):
    return [TwoHop(shapes, lambda n, pieces: bit_words(n) + 4 * pieces, lambda n, pieces, ranks: bit_words(n) + 4 * pieces)]


def one_bit(shapes):
    """Two means for each output unit of a matrix, and for each vector."""
    cells = sum(s[0] if len(s) > 1 else 1 for s in shapes)
    return [Gather(bit_words(total(shapes)) + 8 * cells)]


def qsgd(shapes, bits, bucket=512):
    n = total(shapes)
    return [Gather(math.ceil(bits * n / 8) + 4 * math.ceil(n / bucket))]


def tern_grad(shapes):
    """Two bits a value; deviation and maximum of each tensor, of all ranks, before that."""
    return [Sum(8 * len(shapes)), Gather(math.ceil(2 * total(shapes) / 8))]


def binary(shapes):
    return [Gather(bit_words(total(shapes)) + 8 * len(shapes))]


def atomo(shapes, sparsity):
    """Expected. Convolutions are (out in / 2) x (2 height width), vectors (n / 2) x 2."""
    size = 0.0
    for shape in shapes:
        if len(shape) == 1:
            rows, columns = math.ceil(shape[0] / 2), 2
        elif len(shape) == 2 or shape[2:] == (1, 1):
            rows, columns = shape[:2]
        else:
            rows, columns = math.ceil(shape[0] * shape[1] / 2), 2 * shape[2] * shape[3]
        size += 4 + min(sparsity, rows, columns) * 4 * (1 + rows + columns)
    return [Gather(size, lengths=True)]


def atomo_entries(shapes, ratio):
    """Expected."""
    return [Gather(8 * sum(max(1.0, ratio * count(s)) for s in shapes), lengths=True)]


def block_top_k(shapes, side=64, sent_of_block=64):
    """Blocks of at most side x side values; of each, two levels, and for every sent value its index in the block and two bits.
    Thin matrices, whose outputs are the columns, have longer blocks; vectors are cut into runs."""
    size, bits = 0, (side * side - 1).bit_length()
    for shape in shapes:
        columns = shape[0]
        rows = count(shape) // columns
        width, height = min(columns, side), min(rows, side)
        if width < side:
            height = min(rows, side * side // width)
        if height < side:
            width = min(columns, side * side // height)
        for row in range(0, rows, height):
            for column in range(0, columns, width):
                sent_values = math.ceil(sent_of_block * min(height, rows - row) * min(width, columns - column) / side**2)
                size += 8 + math.ceil(bits * sent_values / 8) + math.ceil(2 * sent_values / 8)
    return [Gather(size)]


def pruned(shapes, ratio):
    """The weights of convolutions and linear layers that remain, and all vectors."""
    return [Sum(4 * (total(shapes) - math.floor(ratio * total(matrices(shapes)))))]
