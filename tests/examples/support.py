# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tests of the examples share: starting the programs, and looking at what they leave.

Each test is NAME.py PROGRAMS MPIRUN: the folder of the built examples, and the launcher ("-" without MPI).
"""
import gzip
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

DIGITS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "data" / "digits"
TEST_IMAGES = DIGITS / "t10k-images-idx3-ubyte.gz"
TEST_LABELS = DIGITS / "t10k-labels-idx1-ubyte.gz"
# A network that trains in a second.
TINY = ["--width", "8", "--batch", "64", "--progress", "none"]


class Programs:
    def __init__(self, arguments):
        self.folder = pathlib.Path(arguments[1]).resolve()
        self.mpirun = None if len(arguments) < 3 or arguments[2] == "-" else arguments[2]

    def command(self, name, *arguments, ranks=0):
        """ranks 0: without a launcher."""
        launcher = [self.mpirun, "-n", str(ranks)] if ranks else []
        return [*launcher, str(self.folder / name), *[str(a) for a in arguments]]

    def run(self, name, *arguments, ranks=0, fails=False, cwd=None):
        """Runs a program that must succeed, or must fail: with 2 for wrong options, else with 1. Returns standard output
        and error."""
        command = self.command(name, *arguments, ranks=ranks)
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, cwd=cwd)
        failure = 2 if "(--help lists the options)" in result.stderr else 1
        if result.returncode != (failure if fails else 0):
            sys.exit(f"{shlex.join(command)}\n{result.stdout}{result.stderr}\nexit code {result.returncode}")
        return result.stdout, result.stderr

    def signalled(self, name, *arguments, ready, number, ranks=0, all_ranks=True, then=None):
        """Starts a program, sends it a signal when the file `ready` is there, and returns its exit status and output.
        With a launcher the signal goes to the ranks themselves (all_ranks) or to the last one of them. `then`: another
        signal right after it."""
        process = subprocess.Popen(self.command(name, *arguments, ranks=ranks), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 60
        while not pathlib.Path(ready).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                sys.exit(f"{name} has not written {ready}:\n{process.communicate()[0]}")
            time.sleep(0.01)
        pids = descendants(process.pid, name) if ranks else [process.pid]
        expect_equal(len(pids), max(1, ranks), f"processes of {name}")
        for each in [number, then] if then else [number]:
            for pid in pids if all_ranks else pids[-1:]:
                os.kill(pid, each)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def train(self, folder, *arguments, ranks=0):
        """Trains a tiny network on the digits; returns its JSON."""
        target = pathlib.Path(folder) / "result.json"
        target.unlink(missing_ok=True)
        self.run("train_image_classifier", *TINY, "--json", target, *arguments, ranks=ranks)
        return load(target)

    def rank_counts(self):
        """Numbers of ranks to try; 0 is without a launcher."""
        return [0, 1, 2, 4] if self.mpirun else [0]


def descendants(pid, name):
    """The processes of this name that a process has started, directly or not."""
    found = []
    for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            executable = pathlib.Path(f"/proc/{child}/exe")
            found += [child] if executable.resolve().name == name else []
            found += descendants(child, name)
    return sorted(found)


def load(path):
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def digests(result):
    return [epoch["digest"] for epoch in result["history"]]


def expect(condition, text):
    if not condition:
        sys.exit(text)


def expect_equal(have, want, text):
    expect(have == want, f"{text}: {have!r}, expected {want!r}")


def idx_images(path=TEST_IMAGES):
    """The pixels of an IDX file, image by image."""
    data = gzip.decompress(pathlib.Path(path).read_bytes())
    count, height, width = (int.from_bytes(data[i : i + 4], "big") for i in (4, 8, 12))
    size = height * width
    return [data[16 + n * size : 16 + (n + 1) * size] for n in range(count)]


def write_text(folder, lines=900):
    """A text that a small language model learns."""
    path = folder / f"text-{lines}.txt"
    if not path.exists():
        path.write_text("".join(f"the {('cat', 'dog', 'owl')[i % 3]} sees {i % 7} red birds .\n" for i in range(lines)))
    return path


def write_translations(data, parts):
    """Files as Multi30k's; `parts`: pairs of lines by name."""
    data.mkdir(parents=True)
    for part, pairs in parts.items():
        for side, language in enumerate(["de", "en"]):
            (data / f"{part}.{language}").write_text("".join(pair[side] + "\n" for pair in pairs))


def main(test):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ranks that wait for each other leave the cores to those that have work.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    with tempfile.TemporaryDirectory(prefix="pufferfish-examples-") as folder:
        test(Programs(sys.argv), pathlib.Path(folder))
