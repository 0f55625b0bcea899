# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The runs of bench/switch_study: which program trains what with which options, and whether a result belongs to a run.

A row is one variant of the switch, a job is a row with a seed. Each job is one process with one thread, so that two jobs
share two cores; those of a group that is `alone` run one at a time, after the others.
"""
import dataclasses
import math
import shlex

IMAGES = "train_image_classifier"
TRANSLATOR = "train_translator"
LANGUAGE = "train_language_model"

RESNET = ("--dataset cifar10 --model resnet18_cifar_stem_bn --width 16 --batch 128 --lr 0.1 --schedule cosine --lr-warmup 1 "
          "--weight-decay 0.0005 --pad-crop 4 --flip")
FULL_WIDTH = RESNET.replace(" --width 16", "")
TRANSFORMER = ("--layers 3 --width 256 --hidden 1024 --heads 8 --epochs 7 --batch 64 --schedule cosine --lr 0.0007 "
               "--noam-warmup 600 --embedding-deviation 1")
LSTM = ("--vocabulary 8000 --width 400 --layers 2 --dropout 0.2 --epochs 2 --batch 20 --segment 35 --lr 20 --schedule cosine "
        "--lr-warmup 0.1 --clip-norm 0.25")
FASHION = ("--dataset fashion-mnist --model small-resnet --width 16 --stem-stride 2 --epochs 8 --batch 128 --lr 0.1 "
           "--schedule cosine --lr-warmup 1 --weight-decay 0.0005 --pad-crop 2 --flip")
DIGITS = ("--dataset digits --model small-resnet --width 16 --epochs 20 --batch 64 --lr 0.1 --schedule cosine --lr-warmup 1 "
          "--weight-decay 0.0005 --pad-crop 1")

# Today's ResNet-18 of width 16 has 238,106 of 701,466 parameters and 23,184,640 of 35,046,656 multiply-adds. The new one may
# have as many parameters and 1.1 times the multiply-adds.
TODAY_PARAMETERS, TODAY_MACS = 238_106, 23_184_640
LIMITS = "--budget 0.33944 --mac-budget 0.7277"
TESTED = "--test-switch --norm-batches 20"
NEW = f"--policy two-sided {LIMITS} {TESTED}"
FIRST_LAYER = "--first-layer 10"
ADVICE = f"--policy paper {FIRST_LAYER}"

# Rows `default` have no --policy: what the programs do without one, at the layers of the group's row `today`. The test at
# the switch changes no step.
DEFAULT = "the default: two-sided, ratio 1/4"

# What follows the truncation: each alone, all together, all minus one. --norm-batches changes running statistics only, so
# the others are measured with it.
ELEMENTS = {
    "carry": ("carried optimizer state", "--carry-state"),
    "frobenius": ("Frobenius decay 0.0005", "--frobenius-decay 0.0005"),
    "ramp": ("ramp of the rate over 100 steps", "--ramp-steps 100"),
    "norms": ("batch norms estimated again from 20 batches", "--norm-batches 20"),
    "projection": ("soft projection every 100 dense steps", "--project-every 100"),
}
# Measured alone only.
ALONE = {
    "extra-norm": ("batch norms between the factors", "--extra-norm 20"),
    "annealing": ("residuals that fade out over an epoch", "--anneal-epochs 1"),
}


@dataclasses.dataclass(frozen=True)
class Metric:
    key: str  # in the program's JSON
    title: str
    unit: str  # of the loss against the dense network
    higher: bool = True

    def loss(self, dense, other):
        """How much worse `other` is: a difference, of perplexities percent."""
        return dense - other if self.higher else 100 * (other / dense - 1)


ACCURACY = Metric("accuracy", "test accuracy, %", "points")
BLEU = Metric("bleu", "BLEU, test 2016", "BLEU")
PERPLEXITY = Metric("test_perplexity", "test perplexity", "% of perplexity", False)


@dataclasses.dataclass(frozen=True)
class Group:
    title: str
    about: str
    metric: Metric
    program: str
    unit_of_macs: str = "an image"
    test_images: int = 10_000  # of images
    train_images: int = 0  # after what `data` leaves; 0: not images
    alone: bool = False  # its runs are for times: one at a time, after all others


# Rows `dense` are what the others of their group are compared with.
GROUPS = {
    "A": Group("Headline: ResNet-18 of width 16, CIFAR-10, 12 epochs", "Switch after 4 epochs, all 50,000 images.", ACCURACY,
               IMAGES, train_images=50_000),
    "A2": Group("Four epochs", "Switch after one epoch. [exchange_curves.md](exchange_curves.md) has the same run on two "
                "ranks of 64 images, whose batch norms see half of a batch: dense 80.37 %, today's way 78.29 %.", ACCURACY,
                IMAGES, train_images=50_000),
    "B": Group("Ablations: six epochs, half of the images", "Switch after 2 epochs unless a row says otherwise; the first half "
               "of each of CIFAR-10's batch files, 25,000 images, and the whole test set.", ACCURACY, IMAGES,
               train_images=25_000),
    "C": Group("Transformer of 3+3 layers, 256 wide, Multi30k", "7 epochs. Batches, rates and shapes as "
               "in [accuracy_small.md](accuracy_small.md), but where a row names another rate. The later switch and the doubled "
               "rate were chosen by the test scores of seed 1. The doubled rate makes the dense network better, too: the goals "
               "compare with the dense network at the rate of that page, so look at both dense rows.", BLEU, TRANSLATOR, "a pair of 20 + 20 tokens"),
    "D": Group("LSTM of 2x400, WikiText-2, 8,000 words", "2 epochs, switch after the first. Batches, rates and shapes as in "
               "[accuracy_small.md](accuracy_small.md). The rate after the switch was chosen by the test perplexity of seed 1.", PERPLEXITY, LANGUAGE, "a token"),
    "E": Group("Fashion-MNIST", "8 epochs, switch after 3. [first_run.md](first_run.md) has the same on two ranks.", ACCURACY,
               IMAGES, train_images=60_000),
    "E2": Group("The bundled digits", "20 epochs, switch after 5. [first_run.md](first_run.md) has the same on two ranks.",
                ACCURACY, IMAGES, test_images=360),
    "T": Group("ResNet-18 of width 16: time a step", "The headline's switches on 2,560 training images, 3 epochs, switch after 1, for "
               "times only. The study runs these after all others and one at a time: the two networks take turns on one machine, "
               "pair by pair.", ACCURACY, IMAGES, train_images=2_560, alone=True),
    "F": Group("ResNet-18 at full width: time and memory", "64 to 512 channels. A short run for times only: 2,560 training and "
               "500 test images of CIFAR-10, so 20 steps an epoch, 3 epochs, switch after 2; its accuracy says "
               "nothing. The study runs these after all others and one at a time. Statistics are taken in all steps of the second "
               "epoch and in none of the first. What they cost is how much slower the second epoch is than the first, by medians, "
               "less the same difference of today's way, which takes none.", ACCURACY, IMAGES, train_images=2_560, alone=True),
}
# What the command line's --only may name: a group brings its parts.
PARTS = {"A": ("A", "A2"), "B": ("B",), "C": ("C",), "D": ("D",), "E": ("E", "E2"), "F": ("F",), "T": ("T",), "A2": ("A2",), "E2": ("E2",)}


@dataclasses.dataclass(frozen=True)
class Row:
    group: str
    name: str
    title: str
    options: str
    seeds: tuple = (1, 2, 3)
    section: str = ""  # of a group's page
    data: str = "whole"  # whole, half, tiny, none (bundled)
    minutes: float = 2.0  # of one core, a guess
    family: str = ""  # on the Pareto plots, whose lines join rows of one moment and rate
    same_rate: str = ""  # of a row with another rate: the group's dense row with that rate
    beside: str = ""  # the group's row that this one varies

    @property
    def key(self):
        return f"{self.group}-{self.name}"

    @property
    def raises_rate(self):
        return float(flags_of(shlex.split(self.options)).get("--switch-rate", 1)) != 1


@dataclasses.dataclass(frozen=True)
class Job:
    row: Row
    seed: int
    device: str = dataclasses.field(default="cpu", compare=False)  # the same result but for rounding

    @property
    def group(self):
        return GROUPS[self.row.group]

    @property
    def file(self):
        return f"{self.row.key}-{self.seed}.json"

    @property
    def minutes(self):
        return self.row.minutes

    @property
    def words(self):
        """What the result depends on."""
        device = [] if self.device == "cpu" else ["--device", self.device]
        return [*shlex.split(self.row.options), "--seed", str(self.seed), "--threads", "1", *device]

    def command(self, build, data, json_file, checkpoint):
        source = [] if self.row.data == "none" else ["--data", data]
        return [f"{build}/examples/{self.group.program}", *source, *self.words, "--progress", "none", "--checkpoint", checkpoint,
                "--resume", "--json", json_file]

    @property
    def dense_options(self):
        """What the steps before the switch depend on besides the seed, as text: the same for two jobs whose networks train
        alike until one of them switches."""
        flags = flags_of(shlex.split(self.row.options))
        kept = {option: value for option, value in flags.items() if option not in AFTER_DENSE}
        network = "low rank" if flags.get("--mode") == "lowrank" else "dense"
        return f"{self.row.data} {network} {sorted(kept.items())}"

    def shown(self):
        """The command as the page has it, without folders of this machine."""
        data = {"whole": "DIR", "half": "HALF", "tiny": "TINY", "none": ""}[self.row.data]
        return shlex.join(self.command("build", data, self.file, self.file.replace(".json", ".ckpt")))

    def __str__(self):
        return f"{self.row.key} seed {self.seed}"


def headline():
    of = f"{RESNET} --epochs 12"
    hybrid = f"{of} --warmup-epochs 4"
    yield Row("A", "dense", "dense", f"{of} --mode dense", minutes=8.5, family="dense")
    yield Row("A", "today", "today's way: plain, ratio 1/4, first two stages dense", f"{hybrid} {ADVICE}", minutes=7.5,
              family="plain")
    yield Row("A", "default", f"{DEFAULT}, first two stages dense", f"{hybrid} {FIRST_LAYER} --test-switch", minutes=7.5,
              family="two-sided")
    yield Row("A", "plain", "plain, ratio 1/4 from layer 2", f"{hybrid} --policy paper {TESTED}", minutes=6.5, family="plain",
              seeds=(1,))
    yield Row("A", "new", "two-sided, today's parameters and 1.1 times its multiply-adds", f"{hybrid} {NEW}", minutes=7.5,
              family="two-sided, two budgets")
    yield Row("A", "later", "the same, rate doubled at the switch after 6, carried state and Frobenius decay",
              f"{of} --warmup-epochs 6 {NEW} --switch-rate 2 --carry-state --frobenius-decay 0.0005", minutes=8.0,
              family="after 6, rate doubled")
    yield Row("A", "later-3", "the same, rate three times as high at the switch",
              f"{of} --warmup-epochs 6 {NEW} --switch-rate 3 --carry-state --frobenius-decay 0.0005", minutes=8.0,
              family="after 6, rate tripled", seeds=(1,), beside="later")
    yield Row("A", "after-8", "the same, rate doubled at the switch after 8",
              f"{of} --warmup-epochs 8 {NEW} --switch-rate 2 --carry-state --frobenius-decay 0.0005", minutes=8.5,
              family="after 8, rate doubled", seeds=(1,), beside="later")
    of = f"{RESNET} --epochs 4"
    yield Row("A2", "dense", "dense", f"{of} --mode dense", minutes=3.0)
    yield Row("A2", "today", "today's way", f"{of} --warmup-epochs 1 {ADVICE} {TESTED}", minutes=2.8)
    yield Row("A2", "default", f"{DEFAULT}, first two stages dense", f"{of} --warmup-epochs 1 {FIRST_LAYER} --test-switch",
              minutes=2.8)
    yield Row("A2", "new", "two-sided, today's parameters and 1.1 times its multiply-adds", f"{of} --warmup-epochs 1 {NEW}",
              minutes=2.8)


def short(name, title, options, section, family="", warmup=2, **more):
    return Row("B", name, title, f"{RESNET} --epochs 6" + (f" --warmup-epochs {warmup}" if warmup else "") + f" {options}",
               section=section, data="half", family=family, **more)


def factors_and_ranks():
    section, one = "Factors and ranks", {"seeds": (1,)}
    yield short("dense", "dense", "--mode dense", section, "dense", warmup=0)
    yield short("plain", "plain, ratio 1/4", "--policy paper", section, "plain")
    yield short("plain-tested", "plain, ratio 1/4, statistics re-estimated", f"--policy paper {TESTED}", section)
    yield short("aware", "data-aware, ratio 1/4", f"--policy data-aware --uniform-ranks {TESTED}", section, "data-aware")
    yield short("two", "two-sided, ratio 1/4", f"--policy two-sided --uniform-ranks {TESTED}", section, "two-sided")
    yield short("both", "two-sided, ratio 1/4's parameters and multiply-adds shared",
                f"--policy two-sided --budget 0.29693 --mac-budget 0.297829 {TESTED}", section, "two-sided, two budgets", **one)
    yield short("share-aware", "data-aware, shared ranks", f"--policy data-aware {TESTED}", section, "data-aware, shared")
    yield short("share-plain", "plain factors, ranks of two-sided", f"--policy two-sided --truncation plain {TESTED}", section,
                "plain, shared")
    yield short("share", "two-sided, shared ranks", f"--policy two-sided {TESTED}", section, "two-sided, shared")
    yield short("today", "today's advice: plain, first two stages dense", ADVICE, section, "plain")
    yield short("two-today", "two-sided at the advice's layers and ranks",
                f"--policy two-sided --uniform-ranks --first-layer 10 {TESTED}", section, "two-sided")
    yield short("new", "two-sided, budgets of the headline", NEW, section, "two-sided, two budgets")
    yield short("cuttlefish", "Cuttlefish, after 4 epochs at the latest", f"--policy cuttlefish {TESTED}", section, "Cuttlefish",
                warmup=4)


def elements():
    section = "After the switch"
    base = f"--policy two-sided {LIMITS} --test-switch"
    norms = ELEMENTS["norms"][1]
    yield short("none", "nothing but the truncation", base, section)
    for name, (title, options) in ELEMENTS.items():
        if name != "norms":  # the row B-new
            yield short(f"only-{name}", f"with {title}", f"{base} {norms} {options}", section)
    for name, (title, options) in ALONE.items():
        yield short(f"only-{name}", f"with {title}", f"{base} {norms} {options}", section)
    everything = " ".join(options for _, options in ELEMENTS.values())
    yield short("all", "with all of them", f"{base} {everything}", section)
    for name, (title, _) in ELEMENTS.items():
        rest = " ".join(options for other, (_, options) in ELEMENTS.items() if other != name)
        yield short(f"without-{name}", f"all but {title}", f"{base} {rest}", section)


def moments():
    section = "Moment and rate"
    # Rows of one seed differ from the row of the usual moment or rate by 0.5 points or more, or are the same run (predicted).
    one, doubled = {"seeds": (1,)}, {"same_rate": "dense-rate-2"}
    yield short("after-1", "two-sided with budgets, switch after 1", NEW, section, warmup=1, beside="new")
    yield short("after-3", "two-sided with budgets, switch after 3", NEW, section, warmup=3, beside="new", **one)
    yield short("after-4", "two-sided with budgets, switch after 4", NEW, section, warmup=4, beside="after-3", **one)
    yield short("predicted", "two-sided with budgets, switch by predicted loss, after 4 at the latest",
                f"{NEW} --switch-when predicted-loss", section, warmup=4, beside="after-3", **one)
    # A rate that rises for our factors is tried for the others too.
    yield short("rate-2", "two-sided with budgets, rate doubled at the switch", f"{NEW} --switch-rate 2", section, beside="new",
                **doubled, **one)
    yield short("after-3-rate-2", "the same, switch after 3", f"{NEW} --switch-rate 2", section, warmup=3, beside="after-3",
                **doubled, **one)
    yield short("today-rate-2", "today's advice, rate doubled at the switch", f"{ADVICE} --switch-rate 2", section,
                beside="today", **doubled, **one)
    of = RESNET.replace("--lr 0.1", "--lr 0.2")
    yield Row("B", "dense-rate-2", "dense, rate doubled throughout", f"{of} --epochs 6 --mode dense", section=section, data="half",
              **one)


def pareto():
    section, one = "Pareto", {"seeds": (1,)}
    for ratio, words in ((0.125, "1/8"), (0.5, "1/2")):
        yield short(f"plain-{ratio}", f"plain, ratio {words}", f"--policy paper --rank-ratio {ratio}", section, "plain", **one)
    limits = {0.15: 0.4, 0.2: 0.5, 0.3: 0.6, 0.5: 0.8}  # with 0.34 and 0.7277 the row B-new
    for share in (0.15, 0.2, 0.3, 0.34, 0.5):
        exact = 0.33944 if share == 0.34 else share
        budget = f"--policy two-sided --budget {exact} {TESTED}"
        yield short(f"budget-{share}", f"two-sided, {100 * share:.0f} % of the parameters", budget, section, "two-sided, shared",
                    **one)
        if share in limits:
            yield short(f"both-{share}", f"two-sided, {100 * share:.0f} % of the parameters, {100 * limits[share]:.0f} % of the "
                        "multiply-adds", f"{budget} --mac-budget {limits[share]}", section, "two-sided, two budgets", **one)


def sequences():
    two = {"seeds": (1, 2)}
    doubled = {"same_rate": "dense-rate-2", **two}
    yield Row("C", "dense", "dense", f"{TRANSFORMER} --mode dense", minutes=10, **two)
    yield Row("C", "today", "today's way: plain, ratio 1/4, first layers dense, switch after 1",
              f"{TRANSFORMER} --warmup-epochs 1 --policy paper --dense-layers 1", minutes=9, **two)
    yield Row("C", "default", f"{DEFAULT}, first layers dense, switch after 1",
              f"{TRANSFORMER} --warmup-epochs 1 --dense-layers 1", minutes=9, **two)
    yield Row("C", "lowrank", "low rank from scratch, first layers dense", f"{TRANSFORMER} --mode lowrank --dense-layers 1",
              minutes=9, **two)
    hybrid = f"{TRANSFORMER} --warmup-epochs 3 --switch-rate 2 --carry-state --policy two-sided --dense-layers 0"
    yield Row("C", "new", "two-sided, today's parameters, switch after 3, rate doubled there, carried state",
              f"{hybrid} --budget 0.7197", minutes=10, **doubled)
    yield Row("C", "embeddings", "the same, embeddings too, 55 % of the parameters",
              f"{hybrid} --factorize-embeddings --budget 0.55", minutes=9, **doubled)
    # What the later switch and a doubled rate do for the others, and all with the rate doubled from the start.
    yield Row("C", "today-rate-2", "today's way, switch after 3, rate doubled there, carried state",
              f"{TRANSFORMER} --warmup-epochs 3 --switch-rate 2 --carry-state --policy paper --dense-layers 1", minutes=10,
              beside="today", **doubled)
    of = TRANSFORMER.replace("--lr 0.0007", "--lr 0.0014")
    yield Row("C", "dense-rate-2", "dense, rate doubled throughout", f"{of} --mode dense", minutes=10, **two)
    yield Row("C", "new-rate-2", "two-sided, today's parameters, switch after 3, carried state, rate doubled throughout",
              f"{of} --warmup-epochs 3 --carry-state --policy two-sided --dense-layers 0 --budget 0.7197", minutes=10,
              beside="new", **doubled)
    hybrid = f"{LSTM} --warmup-epochs 1 --switch-rate 1"
    yield Row("D", "dense", "dense", f"{LSTM} --mode dense", minutes=20, **two)
    yield Row("D", "today", "today's way: plain, ratio 1/4", f"{hybrid} --policy paper", minutes=18, **two)
    yield Row("D", "default", DEFAULT, hybrid, minutes=18, **two)
    new = "--policy two-sided --budget 0.7782"
    yield Row("D", "same-rate", "two-sided, today's parameters", f"{hybrid} {new}", minutes=9, **two)
    yield Row("D", "new", "the same, rate 1.5 times as high at the switch", f"{LSTM} --warmup-epochs 1 --switch-rate 1.5 {new}",
              minutes=9, beside="same-rate", **two)
    yield Row("D", "embeddings", "two-sided, embedding too, 45 % of the parameters",
              f"{hybrid} --policy two-sided --factorize-embeddings --budget 0.45", minutes=14, **two)


def small():
    hybrid = f"{FASHION} --warmup-epochs 3"
    yield Row("E", "dense", "dense", f"{FASHION} --mode dense", minutes=4)
    yield Row("E", "today", "today's way: plain, ratio 1/4 from layer 6", f"{hybrid} --policy paper --first-layer 6", minutes=4)
    yield Row("E", "default", f"{DEFAULT} from layer 6", f"{hybrid} --first-layer 6 --test-switch", minutes=4)
    yield Row("E", "new", "two-sided, today's parameters and 1.1 times its multiply-adds",
              f"{hybrid} --policy two-sided --budget 0.49296 --mac-budget 0.8281 {TESTED}", minutes=4)
    hybrid = f"{DIGITS} --warmup-epochs 5"
    yield Row("E2", "dense", "dense", f"{DIGITS} --mode dense", minutes=0.5, data="none")
    yield Row("E2", "today", "today's way: plain, ratio 1/4 from layer 4", f"{hybrid} --policy paper --first-layer 4", minutes=0.5,
              data="none")
    yield Row("E2", "default", f"{DEFAULT} from layer 4", f"{hybrid} --first-layer 4 --test-switch", minutes=0.5, data="none")
    yield Row("E2", "new", "two-sided, today's parameters and 1.1 times its multiply-adds",
              f"{hybrid} --policy two-sided --budget 0.3662 --mac-budget 0.6456 {TESTED}", minutes=0.5, data="none")


def step_times():
    tiny = {"data": "tiny", "minutes": 0.5}
    hybrid = f"{RESNET} --epochs 3 --warmup-epochs 1"
    yield Row("T", "today", "today's way", f"{hybrid} {ADVICE}", **tiny)
    yield Row("T", "new", "two-sided, today's parameters and 1.1 times its multiply-adds", f"{hybrid} {NEW}", **tiny)


def full_width():
    tiny = {"data": "tiny", "minutes": 1.2}
    hybrid = f"{FULL_WIDTH} --epochs 3 --warmup-epochs 2"
    yield Row("F", "dense", "dense", f"{FULL_WIDTH} --epochs 3 --mode dense", **tiny)
    yield Row("F", "today", "plain, ratio 1/4 from layer 4", f"{hybrid} --policy paper --first-layer 4", **tiny)
    # Without --norm-batches: the time of the switch would contain these batches.
    yield Row("F", "new", "two-sided from layer 4, shared ranks, as many parameters",
              f"{hybrid} --policy two-sided --first-layer 4 --statistics-steps 20", **tiny)


def all_rows():
    rows = [*headline(), *factors_and_ranks(), *elements(), *moments(), *pareto(), *sequences(), *small(), *step_times(), *full_width()]
    assert len({row.key for row in rows}) == len(rows)
    return rows


def all_jobs(groups=None):
    """First seeds of all groups, then the second ones, so that an unfinished study has every row."""
    rows = [row for row in all_rows() if groups is None or row.group in groups]
    return [Job(row, seed) for seed in (1, 2, 3) for row in rows if seed in row.seeds]


# --- does a result belong to a job? ---

# Command-line option: the place in the JSON's `options`, and the value without the option.
TRAINING = {"--mode": ("mode", "hybrid"), "--rank-ratio": ("rank_ratio", 0.25), "--epochs": ("epochs", 20),
            "--warmup-epochs": ("warmup_epochs", 5), "--batch": ("batch", None), "--seed": ("seed", 1)}
NAMES = {
    IMAGES: {**TRAINING, "--dataset": ("data_set", "digits"), "--model": ("model.name", None), "--width": ("model.width", 0),
             "--stem-stride": ("model.stem_stride", 1), "--switch-rate": ("switch_rate", 1.0), "--first-layer": ("first_layer", 2),
             "--lr": ("learning_rate", 0.1), "--weight-decay": ("weight_decay", 5e-4), "--pad-crop": ("pad_crop", 0),
             "--flip": ("flip", False), "--momentum": ("momentum", 0.9), "--label-smoothing": ("label_smoothing", 0.0),
             "--clip-norm": ("clip_norm", 0.0)},
    TRANSLATOR: {**TRAINING, "--layers": ("layers", 3), "--width": ("width", 256), "--hidden": ("hidden", 1024),
                 "--heads": ("heads", 8), "--dropout": ("dropout", 0.1), "--schedule": ("schedule", "noam"),
                 "--lr": ("rate_factor", 1.0), "--noam-warmup": ("noam_warmup", 1000),
                 "--embedding-deviation": ("embedding_deviation", 0.0), "--switch-rate": ("switch_rate", 1.0),
                 "--dense-layers": ("dense_layers", 1), "--label-smoothing": ("label_smoothing", 0.1)},
    LANGUAGE: {**TRAINING, "--vocabulary": ("vocabulary", None), "--width": ("width", 400), "--layers": ("layers", 2),
               "--dropout": ("dropout", 0.4), "--segment": ("segment", 35), "--lr": ("learning_rate", 20.0),
               "--clip-norm": ("clip_norm", 0.25), "--switch-rate": ("switch_rate", 0.5)},
}
HYBRID_ONLY = ("--warmup-epochs", "--switch-rate")
NOT_DENSE = ("--rank-ratio", "--first-layer", "--dense-layers")
SWITCH = ("--policy", "--truncation", "--uniform-ranks", "--budget", "--mac-budget", "--statistics-steps", "--switch-when",
          "--carry-state", "--frobenius-decay", "--ramp-steps", "--ramp-start", "--norm-batches", "--extra-norm", "--anneal-epochs", "--project-every", "--test-switch")
# What changes no step before the switch. A soft projection does.
AFTER_DENSE = {"--mode", "--factorize-embeddings", *HYBRID_ONLY, *NOT_DENSE, *SWITCH} - {"--project-every"}
ELSEWHERE = ("--threads", "--device", "--schedule", "--lr-warmup", "--factorize-embeddings")


def flags_of(words):
    """{option: its value, or True}."""
    flags = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            last = i + 1 == len(words) or words[i + 1].startswith("--")
            flags[word] = True if last else words[i + 1]
    return flags


def expected_switch(flags):
    """`options.switch` of a run with these options, but for `moment`, of which it says whether it is a fixed epoch."""
    policy = flags.get("--policy", "uniform")
    plain = policy in ("paper", "cuttlefish")
    shares = policy in ("data-aware", "two-sided") and "--uniform-ranks" not in flags
    truncation = flags.get("--truncation", "plain" if plain else "two-sided" if policy == "uniform" else policy)
    limits = [f"{float(flags[option])!r} of the {what}" for option, what in
              (("--budget", "parameters"), ("--mac-budget", "multiply-adds")) if option in flags]
    by_loss = flags.get("--switch-when") == "predicted-loss"
    measures = shares or limits or truncation != "plain" or by_loss
    ramp = int(flags.get("--ramp-steps", 0))
    return {"policy": policy, "truncation": truncation, "shared_ranks": shares, "budget": ", ".join(limits) or None,
            "statistics_steps": int(flags.get("--statistics-steps", 0)) or (20 if measures else 0),
            "carry_state": "--carry-state" in flags, "frobenius_decay": float(flags.get("--frobenius-decay", 0)),
            "ramp": f"from {float(flags.get('--ramp-start', 0)):g} over {ramp} steps" if ramp else "none",
            "norm_batches": int(flags.get("--norm-batches", 0)), "project_every": int(flags.get("--project-every", 0)),
            "extra_norm_batches": int(flags.get("--extra-norm", 0)), "anneal_epochs": int(flags.get("--anneal-epochs", 0)),
            "fixed": policy != "cuttlefish" and not by_loss}


def same(found, wanted):
    """Whether a JSON value is what an option says."""
    if isinstance(wanted, str) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return math.isclose(found, float(wanted), rel_tol=1e-12)
    return found == wanted


def switch_difference(flags, document):
    switch = document["options"].get("switch")
    if switch is not None:
        switch = {"extra_norm_batches": 0, "anneal_epochs": 0, **switch}  # earlier programs had no such options
    wanted = expected_switch(flags)
    if switch is None:
        # Programs before these options knew the paper's way, and for a while others without a word of it in `options`;
        # those wrote what they measured.
        if any("weighted_energy" in layer for layer in document.get("switch", {}).get("layers", [])):
            return "its truncation was weighted, but `options` do not say how"
        switch = dict(expected_switch({"--policy": "paper"}), moment="epoch")
    for key, value in wanted.items():
        if key == "fixed":
            if value != (switch.get("moment") == "epoch"):
                return f"moment {switch.get('moment')}"
        elif not same(switch.get(key), value):
            return f"switch.{key} {switch.get(key)}, not {value}"
    return ""


def last_rate(flags, images):
    """Learning rate of the last step of a run with a cosine schedule; it shows how many steps an epoch has."""
    epochs, steps = int(flags["--epochs"]), -(-images // int(flags["--batch"]))
    rate = float(flags["--lr"]) * 0.5 * (1 + math.cos(math.pi * (epochs * steps - 1) / (epochs * steps)))
    return rate * (float(flags.get("--switch-rate", 1)) if flags.get("--mode", "hybrid") == "hybrid" else 1)


def difference(job, document):
    """Why a finished result is not that of the job, by its `options`; empty if it is."""
    options, flags = document["options"], flags_of(job.words)
    names = NAMES[job.group.program]
    unknown = [f for f in flags if f not in names and f not in SWITCH and f not in ELSEWHERE]
    if unknown:
        raise ValueError(f"{job}: no rule says where `options` show {unknown[0]}")
    mode = flags.get("--mode", "hybrid")
    for option, (place, default) in names.items():
        if (option in HYBRID_ONLY and mode != "hybrid") or (option in NOT_DENSE and mode == "dense"):
            continue
        found = options
        for part in place.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        wanted = flags.get(option, default)
        if wanted is not None and not same(found, wanted):
            return f"{place} {found}, not {wanted}"
    fixed = {"ranks": 1, "device": job.device, "precision": "fp32", "restart_rate": False, "decay_all": False, "reflect": False}
    for key, value in fixed.items():
        if options.get(key, value) != value:
            return f"{key} {options[key]}, not {value}"
    if options.get("factorized_embeddings") and "--factorize-embeddings" not in flags:
        return "its embeddings are factorized"
    if "--factorize-embeddings" in flags and options.get("factorized_embeddings") != {"rank_ratio": 0.25}:
        return f"factorized_embeddings {options.get('factorized_embeddings')}"
    if job.group.program != TRANSLATOR:
        warmup = f"warm-up over {float(flags['--lr-warmup']):g} epochs from {'0' if job.group.program == LANGUAGE else '0.1'}"
        schedule = f"{warmup}, cosine over {flags['--epochs']} epochs to 0"
        if options.get("schedule") != schedule:
            return f"schedule {options.get('schedule')}, not {schedule}"
    if job.group.train_images:
        rate, wanted = document["history"][-1]["learning_rate"], last_rate(flags, job.group.train_images)
        if not math.isclose(rate, wanted, rel_tol=1e-6):
            return f"last learning rate {rate:.4g}, not the {wanted:.4g} of {job.group.train_images} images"
    return switch_difference(flags, document) if mode == "hybrid" else ""
