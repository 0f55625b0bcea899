# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Training runs between the hosts of bench/testbed, whose links are slow: accuracy against time, by system and rate.

bench/exchange_curves and bench/pactrain choose their systems here and share the runs: a run is kept once, as
docs/results/exchange_curves/SYSTEM-N-hosts-RATE.json.
"""
import dataclasses
import math
import pathlib
import re
import shlex

import gnuplot
import study_runs
from study_runs import StudyError
from surroundings import ROOT, commit, describe_machine, instruction_set

LIMIT = 20  # minutes a run may take, between the hosts, all of it
TRAIN_IMAGES = 50_000
MODEL = ("--dataset cifar10 --model resnet18_cifar_stem_bn --width 16 --batch 128 --epochs 4 --schedule cosine --lr-warmup 1 "
         "--pad-crop 4 --flip")
SGD = "--lr 0.1 --weight-decay 0.0005"
HYBRID = "--mode hybrid --policy paper --first-layer 10 --warmup-epochs 1"
# As many parameters as after HYBRID's switch, ranks where they save most of the loss.
NEW = ("--mode hybrid --policy two-sided --budget 0.33944 --mac-budget 0.7277 --warmup-epochs 1 --switch-rate 2 --carry-state "
       "--frobenius-decay 0.0005")
RARE = "--local-steps 16 --local-steps-power 1"
RARE_MEANS = "--local-steps 8 --outer-rate 1 --outer-momentum 0"
# The ResNet-18 of width 16 has 701,466 parameters, WEIGHTS of them in convolutions and in the last layer. Without
# floor(0.662838 x 699,056) = 463,360 of these as many are left as HYBRID's 238,106.
WEIGHTS = 699_056
EQUAL_BYTES = "0.662838"


@dataclasses.dataclass(frozen=True)
class System:
    title: str
    options: str
    minutes: float = 6.0  # a guess, at 100 Mbit/s


SYSTEMS = {
    "dense": System("dense", f"--mode dense {SGD}", 12),
    "pufferfish": System("Pufferfish", f"{HYBRID} {SGD}"),
    "powersgd": System("PowerSGD, rank 4", f"--mode dense {SGD} --compress powersgd --compress-rank 4", 5),
    "signum": System("Signum", "--mode dense --lr 0.001 --momentum 0 --weight-decay 0.0005 --compress signum", 5),
    "pufferfish-powersgd": System("Pufferfish with PowerSGD, rank 4",
                                  f"{HYBRID} {SGD} --compress powersgd --compress-rank 4", 5),
    "two-sided": System("two-sided switch", f"{NEW} {SGD}"),
    "two-sided-powersgd": System("two-sided switch with PowerSGD, rank 4",
                                 f"{NEW} {SGD} --compress powersgd --compress-rank 4", 5),
    "powersgd-8": System("PowerSGD, rank 8", f"--mode dense {SGD} --compress powersgd --compress-rank 8", 5),
    "two-sided-powersgd-8": System("two-sided switch with PowerSGD, rank 8",
                                   f"{NEW} {SGD} --compress powersgd --compress-rank 8", 5),
    "powerfish": System("Powerfish: PowerSGD, rank 4, before the switch",
                        f"{HYBRID} {SGD} --compress powersgd --compress-rank 4 --compress-phase dense", 5),
    "pufferfish-rare": System("Pufferfish, rare exchanges", f"{HYBRID} {SGD} {RARE}", 5),
    "pufferfish-streamed": System("Pufferfish, rare exchanges, streamed in 4 fragments",
                                  f"{HYBRID} {SGD} {RARE} --outer-fragments 4 --outer-delay 2", 5),
    "two-sided-rare": System("two-sided switch, means of the parameters every 8 steps", f"{NEW} {SGD} {RARE_MEANS}", 5),
    "topk-0.01-by-bucket": System("top-k, 1 %, bucket by bucket",
                                  f"--mode dense {SGD} --compress topk --compress-ratio 0.01 --compress-by-bucket", 5),
    "bf16": System("dense, bf16", f"--mode dense {SGD} --compress bf16", 8),
    "topk-0.1": System("top-k, 10 %", f"--mode dense {SGD} --compress topk --compress-ratio 0.1"),
    "topk-0.01": System("top-k, 1 %", f"--mode dense {SGD} --compress topk --compress-ratio 0.01", 5),
    "pactrain-0.5": System("PacTrain, 50 % pruned", f"--mode dense {SGD} --prune grasp --prune-ratio 0.5", 8),
    "pactrain-0.8": System("PacTrain, 80 % pruned", f"--mode dense {SGD} --prune grasp --prune-ratio 0.8"),
    "pufferfish-pactrain-0.5": System("Pufferfish with PacTrain, 50 % pruned",
                                      f"{HYBRID} {SGD} --prune grasp --prune-ratio 0.5"),
    "pactrain-0.702": System("PacTrain, 70.2 % pruned", f"--mode dense {SGD} --prune grasp --prune-ratio 0.702"),
    "pactrain-equal": System("PacTrain, Pufferfish's bytes",
                             f"--mode dense {SGD} --prune grasp --prune-ratio {EQUAL_BYTES} --prune-epoch 1"),
}
TARGETS = (75, 79)  # percent of test accuracy, of whose times the pages tell
COMPARED = ["dense", "pufferfish", "powersgd", "signum", "pufferfish-powersgd", "two-sided", "two-sided-powersgd", "powersgd-8",
            "two-sided-powersgd-8", "powerfish",
            "pufferfish-rare", "pufferfish-streamed", "two-sided-rare", "topk-0.01-by-bucket"]  # by bench/exchange_curves


# Networks whose curve the one of PowerSGD on the dense network is not to cross.
AGAINST_POWERSGD = ("two-sided", "two-sided-powersgd")


@dataclasses.dataclass(frozen=True)
class Job:
    system: str
    hosts: int
    rate: str

    @property
    def title(self):
        return SYSTEMS[self.system].title

    @property
    def minutes(self):
        return SYSTEMS[self.system].minutes

    @property
    def file(self):
        return f"{self.system}-{self.hosts}-hosts-{self.rate}.json"

    def command(self, data, build, checkpoint, output):
        return ["bench/testbed", "--hosts", str(self.hosts), "--rate", self.rate, "--seconds", str(60 * LIMIT), "--run",
                f"{build}/examples/train_image_classifier", "--data", str(data), *shlex.split(MODEL), "--seed", "1",
                *shlex.split(SYSTEMS[self.system].options), "--threads", "1", "--progress", "lines", "--checkpoint",
                str(checkpoint), "--checkpoint-every", "100", "--resume", "--json", str(output)]

    def shown(self):
        return shlex.join(self.command("DIR", "build", "RUN.safetensors", "RUN.json"))

    def __str__(self):
        return f"{self.title}, {self.hosts} hosts, {self.rate}"


def same_command(job, command):
    # The paper's policy was the default before it was an option.
    return isinstance(command, str) and command.replace("--policy paper ", "") == job.shown().replace("--policy paper ", "")


def kept(folder, hosts=2, rate="100mbit"):
    """{system: document} of finished runs whose command is that of now."""
    known = {}
    for system in COMPARED:
        job = Job(system, hosts, rate)
        document = study_runs.read(folder / job.file) if (folder / job.file).is_file() else None
        if document and same_command(job, document.get("command")) and not study_runs.unfinished(
                document, "train_image_classifier", "accuracy", folder / job.file):
            known[system] = document
    return known


class CurveRuns(study_runs.Runs):
    """`write`(self): writes the study's page."""

    def __init__(self, a, write):
        self.results = a.results.resolve()
        super().__init__(a.build, a.work, self.results / "exchange_curves")
        self.data, self.testbed, self.write = a.data, a.testbed, write

    def words(self, job, raw_file, checkpoint):
        return [str(self.testbed.resolve()), *job.command(self.data.resolve(), self.build, checkpoint, raw_file)[1:]]

    def program(self, job):
        return self.build / "examples" / "train_image_classifier"

    def prepare(self, todo):
        if self.data is None:
            raise StudyError("say where the data is: --data DIR")

    def unfinished(self, job, document, where):
        return study_runs.unfinished(document, "train_image_classifier", "accuracy", where)

    def same_command(self, job, command):
        return same_command(job, command)

    def facts(self, job, spent):
        return {**spent, "minutes": round(spent["wall_seconds"] / 60, 2), "machine": describe_machine(),
                "instruction_set": instruction_set(), "commit": commit()}

    def told(self, job, document):
        return f"{document['accuracy']:.2f} % in {seconds_of(document)[-1]:.0f} s of training"

    def write_page(self, quiet=False):
        self.write(self)


# --- what results say ---

def mean(epochs, key):
    return sum(e[key] for e in epochs) / len(epochs)


def exposed_ms(result):
    """Of rare exchanges, a step: the median step of an epoch has none. 0 if gradients travel in every step."""
    rare = result.get("exchange", {}).get("rare")
    return rare["exposed_ms"] if rare else 0.0


def payload(result, epoch):
    """Bytes that a rank handed to collectives in a step of an epoch of the result's history, in the mean."""
    exchange = result.get("exchange", {})
    phase = "after" if epoch["low_rank"] else "before"
    if rare := exchange.get("rare"):
        return round(rare["payload_bytes_a_step"])
    if pruning := exchange.get("pruning"):
        ratio, pruned_from = re.fullmatch(r"ratio ([\d.e-]+) .*at epoch (\d+).*", pruning["options"]).groups()
        if epoch["epoch"] > int(pruned_from):  # they are counted from 1 in a history
            if epoch["low_rank"] or "switch" not in result:
                return exchange["payload_bytes"]
            return result[phase]["bytes_per_step"] - 4 * math.floor(float(ratio) * WEIGHTS)
    return result[phase]["bytes_per_step"]


def payloads(result):
    """Of all epochs, each number once, as a table has them."""
    return ", ".join(dict.fromkeys(f"{payload(result, epoch):,}" for epoch in result["history"]))


def phases(result):
    """The epochs before the switch, and those after it where there are some."""
    parts = ([e for e in result["history"] if e["low_rank"] == low] for low in (False, True))
    return [part for part in parts if part]


def seconds_of(result, extra_ms=lambda epoch: 0.0):
    """Seconds from the start to the end of every epoch: training steps, `extra_ms` more for each, and the switch."""
    steps = -(-TRAIN_IMAGES // result["options"]["batch"])
    times, sum_so_far, low_rank = [], 0.0, False
    for epoch in result["history"]:
        if "switch" in result and epoch["low_rank"] and not low_rank:
            sum_so_far += 1e-3 * result["switch"]["milliseconds"]
        low_rank = epoch["low_rank"]
        sum_so_far += 1e-3 * steps * (epoch["ms_per_step"] + exposed_ms(result) + extra_ms(epoch))
        times.append(round(sum_so_far, 2))
    return times


def time_to(result, accuracy, times=None):
    """Seconds until a test accuracy, on the line between the ends of two epochs; None if it is not reached."""
    before = 0.0, 0.0
    for at, epoch in zip(times or seconds_of(result), result["history"]):
        reached = epoch["test_accuracy"]
        if reached >= accuracy:
            share = (accuracy - before[1]) / (reached - before[1])
            return before[0] + share * (at - before[0])
        before = at, reached
    return None


class Difference:
    """Accuracy and seconds of training of a finished run against those of a second one."""

    def __init__(self, ours, theirs):
        self.points = ours["accuracy"] - theirs["accuracy"]
        self.seconds = seconds_of(ours)[-1] - seconds_of(theirs)[-1]
        self.same_machine = ours["machine"]["cpu"] == theirs["machine"]["cpu"]

    @property
    def wins(self):
        return self.points >= 0 and self.seconds <= 0

    @property
    def text(self):
        return (f"{abs(self.points):.2f} points {'less' if self.points < 0 else 'more'} accurate, {abs(self.seconds):.0f} s "
                f"{'slower' if self.seconds > 0 else 'faster'}" + ("" if self.same_machine else ", on another machine"))

    def winner(self, ours, theirs):
        """Which system is at least as good in both, in words."""
        if self.wins:
            return f"{SYSTEMS[ours].title} wins"
        return f"{SYSTEMS[theirs].title} wins" if self.points <= 0 and self.seconds >= 0 else "neither wins in both"


def step_by_phase(result):
    """Time and payload of a step, before and after the switch."""
    words = ("before the switch", "after it") if "switch" in result else ("",)
    return " and ".join(f"{mean(part, 'ms_per_step') + exposed_ms(result):.1f} ms with a payload of {payload(result, part[-1]):,} "
                        f"bytes {when}".strip() for part, when in zip(phases(result), words))


# --- what the programs share ---

def add_arguments(parser):
    study_runs.add_arguments(parser, "exchange_curves", jobs=1)
    parser.add_argument("--testbed", type=pathlib.Path, default=ROOT / "bench" / "testbed", help="what starts the runs")


def not_all(missing):
    return [f"**Not all has run.** Missing: {'; '.join(missing)}.", ""] if missing else []


def machines(known):
    """`known`: documents."""
    texts = sorted({f"{d['machine']['cpu']}, {d['machine']['cores']} cores; {d['machine']['compiler']}" for d in known})
    return [f"Machine: {' and '.join(texts)}; commits {', '.join(sorted({d['commit'] for d in known}))}.", ""]


def draw(folder, file, known):
    """Accuracy against time of {title: document}, by gnuplot, into folder/file; whether there is such a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = [([(s, e["test_accuracy"]) for s, e in zip(seconds_of(r), r["history"])],
               f"using 1:2 with linespoints lw 2 pt 7 ps 0.5 title '{title}'") for title, r in known.items()]
    return gnuplot.draw(folder / file, "760,460", "set xlabel 'seconds of training'\nset ylabel 'test accuracy / %'\n"
                        "set key bottom right", curves)
