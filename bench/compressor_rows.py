# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of bench/compressors: systems with their settings, what each sends, and the runs that each needs. bench/scaling
predicts steps of the same rows, bench/testbed measures them by these names."""
import dataclasses
import re
import shlex

import compressor_bytes as sizes
from curve_runs import HYBRID, MODEL, RARE, RARE_MEANS

MODES = {"dense": "--mode dense", "hybrid": HYBRID}
RANKS = (2, 8, 64)
BEST = 5  # rows that get further seeds, beside the uncompressed ones
SEEDS = (1, 2, 3)
# Learning rates that are tried, the first one first; the best accuracy of seed 1 counts.
SIGNS = (0.001, 0.0005, 0.002)
NOISY = (0.1, 0.05, 0.025)
OWN_MOMENTUM = (0.1, 0.05, 0.2)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    family: str  # of a paragraph of the page
    title: str
    options: str  # of the training program, but for mode and learning rate
    messages: object = None  # of a step, by the shapes of the parameters (compressor_bytes)
    rates: tuple = (0.1,)
    modes: tuple = ("dense", "hybrid")
    overlaps: bool = False  # travels while the backward pass runs
    rare: bool = False  # messages of an exchange, not of a step
    coded: bool = True  # whether bench_compressors knows it
    same_as: str = ""  # the row with the same bits, which is trained for both
    minutes: float = 4.0

    @property
    def codec(self):
        """Options of bench_compressors; none where there is nothing to time."""
        if not self.coded:
            return []
        words = shlex.split(re.sub(r"--momentum 0", "", self.options))
        return ["--compressors", *words[words.index("--compress") + 1:]]

    @property
    def compressor(self):
        """As bench_exchange is told it and writes it into its records: the words after --compress."""
        return " ".join(self.codec[1:]) or self.name

    @property
    def is_step(self):
        """Whether bench_exchange can time its steps: no rare exchanges, no pruned network, no phase of a run."""
        return not self.rare and self.family not in ("pactrain", "powerfish")

    @property
    def local_steps(self):
        """H of rare exchanges; 0: gradients are exchanged in every step."""
        found = re.search(r"--local-steps (\d+)", self.options)
        return int(found[1]) if found else 0


def rows():
    plain = {"overlaps": True, "coded": False}
    yield Row("none", "none", "none", "", sizes.whole, **plain)
    for wire in ("bf16", "fp16"):
        yield Row(wire, "wire", wire, f"--compress {wire}", lambda s: sizes.whole(s, 2), **plain)
    for rank in (1, 2, 4):
        yield Row(f"powersgd-{rank}", "powersgd", f"PowerSGD, rank {rank}", f"--compress powersgd --compress-rank {rank}",
                  lambda s, r=rank: sizes.power_sgd(s, r))
    yield Row("signum", "signum", "Signum", "--compress signum --momentum 0", sizes.signum, SIGNS)
    yield Row("signum-two-hop", "signum", "Signum, two hops", "--compress signum --compress-route two-hop --momentum 0",
              sizes.signum_two_hop, SIGNS, same_as="signum")
    for ratio in (0.1, 0.01):
        yield Row(f"topk-{ratio}", "topk", f"top-k, {100 * ratio:g} %", f"--compress topk --compress-ratio {ratio}",
                  lambda s, r=ratio: sizes.top_k(s, r))
    for name, title in (("randomk", "random-k"), ("randomblock", "random block")):
        yield Row(name, "randomk", f"{title}, 1 %", f"--compress {name} --compress-ratio 0.01", lambda s: sizes.random_k(s, 0.01),
                  NOISY)
    for ratio in (0.01, 0.001):
        yield Row(f"dgc-{ratio}", "dgc", f"DGC, {100 * ratio:g} %", f"--compress dgc --compress-ratio {ratio} --momentum 0",
                  lambda s, r=ratio: sizes.dgc(s, r), OWN_MOMENTUM)
    yield Row("efsign", "efsign", "EF-sign", "--compress efsign", sizes.ef_sign)
    yield Row("doublesqueeze", "doublesqueeze", "DoubleSqueeze", "--compress doublesqueeze", sizes.double_squeeze)
    yield Row("onebit", "onebit", "1-bit SGD", "--compress onebit", sizes.one_bit)
    for bits in (2, 4, 8):
        yield Row(f"qsgd-{bits}", "qsgd", f"QSGD, {bits} bits", f"--compress qsgd --compress-bits {bits}",
                  lambda s, b=bits: sizes.qsgd(s, b), NOISY if bits == 2 else (0.1,))
    yield Row("terngrad", "terngrad", "TernGrad", "--compress terngrad", sizes.tern_grad, NOISY)
    yield Row("binary", "binary", "stochastic binary", "--compress binary", sizes.binary, NOISY)
    yield Row("atomo", "atomo", "ATOMO, 2 singular triplets", "--compress atomo --compress-sparsity 2",
              lambda s: sizes.atomo(s, 2), NOISY)
    yield Row("atomo-entry", "atomo", "ATOMO, 1 % of the entries", "--compress atomo-entry --compress-ratio 0.01",
              lambda s: sizes.atomo_entries(s, 0.01), NOISY)
    yield Row("powerfish", "powerfish", "Powerfish, rank 4; after the switch",
              "--compress powersgd --compress-rank 4 --compress-phase dense", sizes.whole, modes=("hybrid",), **plain)
    yield Row("rare", "rare", "rare exchanges, H = 16", RARE, sizes.whole, rare=True, coded=False)
    yield Row("rare-mean", "rare", "rare exchanges, H = 16, means without an outer step",
              f"{RARE} --outer-rate 1 --outer-momentum 0", sizes.whole, rare=True, coded=False)
    yield Row("rare-8-mean", "rare", "rare exchanges, H = 8, means without an outer step", RARE_MEANS, sizes.whole, rare=True,
              coded=False)
    yield Row("rare-blocktopk", "rare", "rare exchanges, H = 16, block top-k",
              f"{RARE} --outer-rate 0.4 --outer-momentum 0 --compress blocktopk", sizes.block_top_k, rare=True)
    for ratio in (0.5, 0.8):
        yield Row(f"pactrain-{ratio}", "pactrain", f"PacTrain, {100 * ratio:g} % pruned", f"--prune grasp --prune-ratio {ratio}",
                  lambda s, r=ratio: sizes.pruned(s, r), **plain)


ROWS = {row.name: row for row in rows()}


@dataclasses.dataclass(frozen=True)
class Training:
    """Two ranks on this machine."""
    name: str
    mode: str
    rate: float
    seed: int

    @property
    def row(self):
        return ROWS[self.name]

    @property
    def minutes(self):
        return self.row.minutes

    @property
    def file(self):
        return f"{self.mode}-{self.name}-rate-{self.rate:g}-seed-{self.seed}.json"

    def command(self, build, data, checkpoint, output):
        # mpirun would kill its processes one second after a signal: too soon for a step and a checkpoint.
        return ["mpirun", "-np", "2", "--bind-to", "none", "--mca", "odls_base_sigkill_timeout", "30",
                f"{build}/examples/train_image_classifier", "--data", data, *shlex.split(MODEL), "--seed", str(self.seed),
                *shlex.split(MODES[self.mode]), "--lr", f"{self.rate:g}", "--weight-decay", "0.0005",
                *shlex.split(self.row.options), "--threads", "1", "--progress", "lines",
                "--checkpoint", checkpoint, "--checkpoint-every", "100", "--resume", "--json", output]

    def shown(self):
        return shlex.join(self.command("build", "DIR", "RUN.safetensors", "RUN.json"))

    def __str__(self):
        return f"{self.row.title}, {self.mode}, rate {self.rate:g}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Encoding and decoding of the ResNet-18 of the published width, in one thread, without a network."""
    name: str
    minutes: float = 1.0

    @property
    def row(self):
        return ROWS[self.name]

    @property
    def file(self):
        return f"codec-{self.name}.json"

    def command(self, build, output):
        return [f"{build}/bench/bench_compressors", *self.row.codec, "--modes", *MODES, "--ranks", *map(str, RANKS), "--threads",
                "1", "--json", output]

    def shown(self):
        return shlex.join(self.command("build", "RUN.json"))

    def __str__(self):
        return f"{self.row.title}, encoding and decoding"


def timings(names=ROWS):
    return [Timing(name) for name in names if ROWS[name].codec]


def first_runs(names=ROWS):
    """Seed 1 of every row that is trained: each row's first rate before all others, so that an unfinished study has every
    row."""
    trained = [ROWS[name] for name in names if not ROWS[name].same_as]
    most = max((len(row.rates) for row in trained), default=0)
    return [Training(row.name, mode, row.rates[i], SEEDS[0]) for i in range(most) for row in trained for mode in row.modes
            if i < len(row.rates)]


def all_seeds():
    """What might be kept of further seeds, of any row at any of its rates."""
    return [dataclasses.replace(job, seed=seed) for seed in SEEDS[1:] for job in first_runs()]


def chosen_rate(name, mode, known):
    """The rate of the best accuracy of seed 1 among what has run; None if nothing has."""
    row = ROWS[ROWS[name].same_as or name]
    accuracies = {rate: known[job]["accuracy"] for rate in row.rates
                  if (job := Training(row.name, mode, rate, SEEDS[0])) in known and known[job].get("accuracy") is not None
                  and not known[job].get("diverged")}
    return max(accuracies, key=accuracies.get) if accuracies else None


def further_runs(known):
    """More seeds of the best rows and of the uncompressed ones, once every row has run."""
    first = first_runs()
    if any(job not in known for job in first):
        return []
    found = []
    for name, row in ROWS.items():
        for mode in row.modes if not row.same_as else ():
            if (rate := chosen_rate(name, mode, known)) is not None:
                found.append((known[Training(name, mode, rate, SEEDS[0])]["accuracy"], name, mode, rate))
    compressed = sorted((f for f in found if f[1] != "none"), key=lambda f: -f[0])[:BEST]
    chosen = [f for f in found if f[1] == "none"] + compressed
    return [Training(name, mode, rate, seed) for seed in SEEDS[1:] for _, name, mode, rate in chosen]
