# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of bench/tickets and their page: docs/results/tickets.md and its plots.

A run gives points: networks with their size, their accuracy, and all that was spent until they were trained. A search for lottery
tickets gives one for each level, all other runs give one.
"""
import dataclasses
import statistics

import gnuplot
import study_runs

EPOCHS = 8
STEPS = -(-50_000 // 128)  # of an epoch; the last batch is smaller
# The hybrid network of row `pufferfish`: the last seven convolutions have rank ratio 1/4.
PARAMETERS, MACS = 510_074, 18_400_512
TRAIN, LOTTERY, BIRD = "train_image_classifier", "lottery_ticket", "early_bird"
HYBRID = "--first-layer 10 --warmup-epochs 3"


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    program: str
    options: str
    family: str  # a curve of the plots
    minutes: float = 4.0


ROWS = {
    "dense": Row("dense", TRAIN, "--mode dense", "dense"),
    "pufferfish": Row("Pufferfish, plain factors", TRAIN, f"--policy paper {HYBRID}", "Pufferfish, plain"),
    "two-sided": Row("Pufferfish, two-sided factors", TRAIN, HYBRID, "Pufferfish, two-sided"),
    "budget": Row("Pufferfish, two-sided, ranks from two budgets", TRAIN,
                  f"--policy two-sided --budget {PARAMETERS / 1_255_546:.5f} --mac-budget {MACS / 25_216_256:.4f} --warmup-epochs 3",
                  "Pufferfish, two budgets"),
    **{f"shrink-{x}": Row(f"Pufferfish, two-sided, ranks shrink below {x}", TRAIN, f"{HYBRID} --shrink-rank {x} --shrink-patience 1",
                          "Pufferfish, shrinking ranks") for x in (0.5, 0.7)},
    "lottery": Row("lottery tickets, rewound to step 0", LOTTERY, f"--target {PARAMETERS}", "lottery tickets, step 0", 23),
    "lottery-epoch": Row("lottery tickets, rewound to the first epoch's end", LOTTERY, f"--target {PARAMETERS} --rewind-step {STEPS}",
                         "lottery tickets, epoch 1", 21),
    "early-bird-0": Row("dense, by the recipe of Early-Bird, q = 0", BIRD, "--share 0 --latest 3", "dense, recipe of Early-Bird"),
    **{f"early-bird-{q}": Row(f"Early-Bird, q = {q}", BIRD, f"--share {q} --latest 3", "Early-Bird") for q in (0.15, 0.3, 0.36, 0.5, 0.7)},
    "early-bird-0.36-reinit": Row("Early-Bird, q = 0.36, new initial values", BIRD, "--share 0.36 --latest 3 --weights reinit",
                                  "Early-Bird, new values"),
    **{f"slimming-{q}": Row(f"network slimming, q = {q}", BIRD, f"--criterion slimming --share {q} --fine-tune-epochs 3",
                            "network slimming", 5) for q in (0.36, 0.5)},
    "filter-norms-0.36": Row("filter norms, q = 0.36", BIRD, "--criterion filter-norms --share 0.36 --fine-tune-epochs 3",
                             "filter norms", 5),
}

INTRODUCTION = f"""<!-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception -->
<!-- Written by bench/tickets; the numbers are those of tickets/*.json. -->
# Pufferfish beside tickets and pruned channels

This page shows what each way to a smaller network costs, and how accurate the smaller network is, so that you can choose one.
*Lottery tickets* train the network again and again, and remove 20 % of the remaining weights each time. *Early-Bird tickets* remove
channels as soon as the choice has settled during the first training. *Network slimming* and *filter norms* remove channels after the
whole training, and train on for three epochs. *Pufferfish* factorizes layers after three epochs. [pruning.md](../pruning.md) says how
each of them works. In a training this short, the choice of Early-Bird tickets does not settle by the published criterion before the last
epoch, so that tickets are drawn after the third epoch (`--latest 3`), when Pufferfish switches. As published, scales of batch norms
start at 0.5 and are drawn to zero there and in network slimming; the row with q = 0 shows what that does to the dense network.

The network is the VGG-19 of the paper's comparison with lottery tickets, of width 16 instead of 64, on CIFAR-10; T = {EPOCHS} epochs
of half a cosine, batches of 128, SGD with momentum 0.9. Accuracy is that of the last epoch on the test images, never the best over
epochs. The shares q of 0.15 and 0.36 are estimates of those that lead to the hybrid network's multiply-adds and parameters; the tables have the
sizes that they led to.
"""


@dataclasses.dataclass(frozen=True)
class Point:
    parameters: int
    macs: int
    accuracy: float
    epochs: float  # of training until then
    seconds: float  # of the processor
    bytes: float  # sent by a rank: payload of all gradients until then


def points_of(key, document):
    """The networks that a run has made, in order."""
    if "levels" in document:
        points, steps, sent = [], 0, 0.0
        if document.get("start"):
            steps = document["start"]["steps"]
            sent = steps * document["levels"][0]["dense_bytes"]
        for level in document["levels"]:
            sent += (level["steps"] - steps) * level["bytes"]
            steps = level["steps"]
            points.append(Point(level["parameters"], level["macs"], level["accuracy"], level["epochs"], level["processor_seconds"], sent))
        return points
    history, after = document["history"], document["after"]
    sent = STEPS * sum(epoch["bytes_per_step"] for epoch in history)
    return [Point(after["parameters"], after["macs"], document["accuracy"], len(history),
                  document.get("processor_seconds", document["cpu_seconds"]), sent)]


def mean_points(key, known):
    """Means over seeds: points of a row, by their order."""
    runs = [points_of(key, document) for job, document in known.items() if job.key == key]
    return [Point(*(statistics.mean(values) for values in zip(*(dataclasses.astuple(point) for point in same)))) for same in zip(*runs)]


def at_size(points, axis, size):
    """Accuracy of a family at a size, on the line between the two networks around it; None where there are none."""
    ordered = sorted(points, key=lambda point: getattr(point, axis))
    for small, large in zip(ordered, ordered[1:]):
        low, high = getattr(small, axis), getattr(large, axis)
        if low <= size <= high and low < high:
            return small.accuracy + (large.accuracy - small.accuracy) * (size - low) / (high - low)
    near = [point.accuracy for point in ordered if abs(getattr(point, axis) / size - 1) < 0.01]
    return near[0] if near else None


# --- tables ---

def spread(values):
    values = list(values)
    return f"{statistics.mean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def last_accuracies(key, known):
    return [document["accuracy"] for job, document in known.items() if job.key == key]


def size_table(known):
    """The last network of every row."""
    lines = ["| way | parameters | multiply-adds an image | test accuracy, % | epochs | processor minutes | gradients sent, GB |",
             "|---|---:|---:|---:|---:|---:|---:|"]
    for key, row in ROWS.items():
        points = mean_points(key, known)
        if not points:
            lines.append(f"| {row.title} | not run | | | | | |")
            continue
        p = points[-1]
        lines.append(f"| {row.title} | {p.parameters:,.0f} | {p.macs:,.0f} | {spread(last_accuracies(key, known))} | {p.epochs:.3g} | "
                     f"{p.seconds / 60:.1f} | {p.bytes / 1e9:.2f} |")
    return [*lines, ""]


def cost_table(known):
    """What each row has spent when its network is as small as the hybrid one, and how many times Pufferfish's."""
    ours = mean_points("pufferfish", known)
    if not ours:
        return []
    lines = [f"| way | accuracy, % | epochs | times Pufferfish's processor time | times its bytes |", "|---|---:|---:|---:|---:|"]
    for key, row in ROWS.items():
        small = next((p for p in mean_points(key, known) if p.parameters <= 1.01 * PARAMETERS), None)
        if small is not None:
            lines.append(f"| {row.title} | {small.accuracy:.2f} | {small.epochs:.3g} | {small.seconds / ours[0].seconds:.2f} | "
                         f"{small.bytes / ours[0].bytes:.2f} |")
    return [*lines, ""]


def equal_table(known):
    """Accuracy of each family at the hybrid network's size."""
    lines = ["| way | accuracy at equal parameters, % | at equal multiply-adds, % |", "|---|---:|---:|"]
    for family, points in families(known).items():
        cells = [at_size(points, axis, size) for axis, size in (("parameters", PARAMETERS), ("macs", MACS))]
        if any(cell is not None for cell in cells):
            lines.append(f"| {family} | " + " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells) + " |")
    return [*lines, ""]


def level_table(key, known):
    points = mean_points(key, known)
    if not points:
        return []
    lines = [f"### {ROWS[key].title}", "", "| level | parameters | accuracy, % | epochs so far | processor minutes so far | bytes a step |",
             "|---:|---:|---:|---:|---:|---:|"]
    for level, p in enumerate(points):
        lines.append(f"| {level} | {p.parameters:,.0f} | {p.accuracy:.2f} | {p.epochs:.3g} | {p.seconds / 60:.1f} | {4 * p.parameters:,.0f} |")
    return [*lines, ""]


def tickets_found(known):
    """When each Early-Bird ticket was found."""
    found = [f"{ROWS[job.key].title}, seed {job.seed}: " + (f"after epoch {document['ticket']['epoch']}" if document["ticket"] else "none, trained whole")
             for job, document in known.items() if ROWS[job.key].family.startswith("Early-Bird")]
    return ["Early-Bird tickets were found: " + "; ".join(found) + ".", ""] if found else []


PUBLISHED = """## Beside the published numbers

The numbers of this section are recalled from the papers and were not checked against them: they are no evidence.

- Lottery tickets: the Pufferfish paper names 5.67 times the time of Pufferfish until a VGG-19 has its size (T = 160, width 64).
- Early-Bird tickets, ResNet-50 on ImageNet (parameters / top-1 accuracy): Pufferfish 15.20 M / 75.62 %; q = 0.3 16.47 M / 73.86 %;
  q = 0.5 15.08 M / 73.35 %; q = 0.7 7.88 M / 70.16 %. ImageNet was not trained here.
"""


# --- plots ---

def families(known):
    points = {}
    for key, row in ROWS.items():
        if found := mean_points(key, known):
            points.setdefault(row.family, []).extend(found)
    return points


def draw(raw, known):
    """Accuracy against parameters, multiply-adds and processor minutes, by gnuplot; names of the files."""
    drawn = []
    for axis, label, scale in (("parameters", "million parameters", 1e-6), ("macs", "million multiply-adds an image", 1e-6),
                               ("seconds", "processor minutes until then", 1 / 60)):
        curves = []
        for i, (family, points) in enumerate(families(known).items()):
            curves.append((sorted((scale * getattr(p, axis), p.accuracy) for p in points),
                           f"using 1:2 with linespoints lw 1.5 pt {i + 4} ps 0.8 lc {i + 1} title '{family}'"))
        if gnuplot.draw(raw / f"{axis}.svg", "760,480", f"set offsets graph 0.03,0.03,0.03,0.03\nset xlabel '{label}'\n"
                        "set ylabel 'test accuracy / %'\nset key outside bottom center horizontal", curves):
            drawn.append(f"{axis}.svg")
    return drawn


# --- the page ---

def surroundings(known):
    def names(key):
        return ", ".join(sorted({str(document[key]) for document in known.values() if document.get(key)})) or "not known"
    spent = sum(document["cpu_seconds"] for document in known.values()) / 60
    return [f"Machine: {names('machine')}, {names('instruction_set')}; {names('compiler')}, release build; commits {names('commit')}. All runs "
            f"have one thread and one rank; they took {spent:.0f} minutes of the processor. The machine is shared: a comparison of times "
            "holds to about a tenth. *Gradients sent* are the payload of a rank that exchanges gradients in every step: all of them, or "
            "those of the remaining weights.", ""]


def write_page(page, raw, jobs, known):
    seeds = sorted({job.seed for job in known})
    missing = [str(job) for job in jobs if job not in known]
    lines = [INTRODUCTION, *surroundings(known), "```sh", "meson setup build -Dbuildtype=release -Dmarch=native && ninja -C build",
             f"bench/tickets --data DIR --seeds {max(seeds)}", "```", ""]
    if missing:
        lines += [f"**Not all has run.** Missing: {'; '.join(missing)}.", ""]
    lines += ["## All networks", "", *size_table(known), *tickets_found(known),
              "## What it costs to reach the hybrid network's size", "",
              f"The first network of each way that has at most the {PARAMETERS:,} parameters of the hybrid network (1 % more allowed).", "",
              *cost_table(known), "## At equal size", "",
              f"At {PARAMETERS:,} parameters and at {MACS:,} multiply-adds, on the line between the two networks of each way around this "
              "size. Masks do not save multiply-adds, so lottery tickets have none at this size.", "", *equal_table(known)]
    for file in draw(raw, known):
        lines += [f"![test accuracy against {file.removesuffix('.svg')}](tickets/{file})", ""]
    lines += ["## Levels of the lottery tickets", ""]
    for key, row in ROWS.items():
        if row.program == LOTTERY:
            lines += level_table(key, known)
    lines += [PUBLISHED, "## Commands", "", "```sh", *(job.shown() for job in known), "```"]
    study_runs.write_text(page, "\n".join(lines).rstrip() + "\n")
