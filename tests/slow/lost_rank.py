#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""lost_rank.py PROGRAMS MPIRUN [TIMES]

One of four ranks of a training run is killed, or stopped, at a random moment, TIMES (20) times each. After a kill the
job must end within five seconds; after a stop the others must say which rank did not arrive and end the job, and one
of them saves the run by itself: a file that is whole and can be gone on from. Every time no process is left, no half-
written file, and the exit status is zero only if the run had ended with the parameters of an undisturbed one. In the
end the run goes on from its last checkpoint, and from what was saved last by one rank, to the very parameters of a
run without disturbance. The kills and the stops each have a run of their own, at the same time: a job with a stopped
rank mostly waits. All limits are longer on a machine that starts a job slowly.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from support import digests, expect, expect_equal, load, main  # noqa: E402

RANKS = 4
RUN = ["--epochs", "60", "--warmup-epochs", "30", "--width", "8", "--batch", "32", "--threads", "1", "--progress", "none"]


def processes_of(mark):
    """{rank: process} of those that were started with `mark` in their environment."""
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if folder.name.isdigit() and f"PUFFERFISH_LOST_RANK={mark}".encode() in environment.split(b"\0"):
            rank = re.search(rb"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", environment)
            if rank is not None:
                found[int(rank.group(1))] = int(folder.name)
    return found


def changed(path):
    """When a file was written last; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class Series:
    """A training run that one signal hits again and again."""

    def __init__(self, programs, folder, what, times, seconds, undisturbed):
        self.programs, self.folder, self.what, self.times, self.undisturbed = programs, folder, what, times, undisturbed
        # A step takes milliseconds, but the ranks are more than the cores.
        self.timeout = max(2.0, 2.0 * seconds)
        self.limit = 5.0 + 5.0 * seconds + (1.5 * self.timeout if what == signal.SIGSTOP else 0.0)
        self.run = [*RUN, "--timeout", str(self.timeout)]
        self.checkpoint, self.result = folder / "run.safetensors", folder / "result.json"
        self.command = programs.command("train_image_classifier", *self.run, "--checkpoint", self.checkpoint,
                                        "--checkpoint-every", "5", "--resume", "--json", self.result, ranks=RANKS)
        self.chance = random.Random(what)

    def expect_undisturbed(self, text):
        expect_equal(digests(load(self.result)), digests(self.undisturbed), f"parameters {text}")

    def finish(self, job, about):
        """Waits for a job without further disturbance, which must end well."""
        _, errors = job.communicate(timeout=600)
        expect_equal(job.returncode, 0, f"exit status of {about}; {errors}")

    def disturb(self, mark):
        """Starts the job, hits a rank, waits for the end. (rank, errors, seconds it took); None if training had
        ended before: the caller checks its results."""
        before = changed(self.checkpoint)
        job = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PUFFERFISH_LOST_RANK": mark})
        # MPI_Init has no timeout, and before the first step there is nothing to save: a rank is stopped after that.
        while job.poll() is None and (len(ranks := processes_of(mark)) < RANKS or
                                      (self.what == signal.SIGSTOP and changed(self.checkpoint) == before)):
            time.sleep(0.01)
        time.sleep(self.chance.uniform(0.0, 1.0))
        rank = self.chance.randrange(RANKS)
        if job.poll() is not None:
            self.finish(job, "a job that was not hit")
            return None
        try:
            os.kill(ranks[rank], self.what)
        except ProcessLookupError:  # the rank has ended, and the job is about to
            self.finish(job, "a job that was not hit")
            return None
        start = time.monotonic()
        try:
            _, errors = job.communicate(timeout=self.limit + 10.0)
        except subprocess.TimeoutExpired:
            # Stopped when training was over: only MPI_Finalize waits for a rank then, and it has no timeout.
            os.kill(ranks[rank], signal.SIGCONT)
            self.finish(job, f"a job that did not end by itself after {self.what.name} of rank {rank}")
            return None
        if job.returncode == 0:  # the rank had ended, and the launcher had not asked for its status yet
            return None
        return rank, errors, time.monotonic() - start

    def had_ended(self):
        """Whether the checkpoint is that of the whole run: then nothing was left to be saved."""
        copy, result = self.folder / "copy.safetensors", self.folder / "copy.json"
        copy.write_bytes(self.checkpoint.read_bytes())
        self.programs.run("train_image_classifier", *self.run, "--checkpoint", copy, "--resume", "--stop-after", 1,
                          "--json", result, ranks=RANKS)
        return result.exists() and digests(load(result)) == digests(self.undisturbed)

    def saved_alone(self, errors, about):
        """A copy of what one of the ranks that were left has saved; None where the switch was being made, or training
        had ended."""
        named = re.search(r"saved the run by itself: --checkpoint (\S+) --resume", errors)
        if named is None:
            expect("in the middle of the switch" in errors or self.had_ended(), f"no rank has saved: {about}")
            return None
        saved = pathlib.Path(named.group(1))
        data = saved.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        facts = header.pop("__metadata__")
        expect_equal(max(t["data_offsets"][1] for t in header.values()), len(data) - 8 - length, f"bytes of {saved}, {about}")
        expect("alone" in facts["training.record"], "the record says who has saved")
        copy = self.folder / "alone.safetensors"
        copy.write_bytes(data)
        saved.unlink()
        self.programs.run("train_image_classifier", *self.run, "--checkpoint", copy, "--resume", "--stop-after", 3,
                          ranks=RANKS)
        copy.write_bytes(data)
        return copy

    def expect_none_left(self, mark, about):
        deadline = time.monotonic() + self.limit
        while left := processes_of(mark):
            expect(time.monotonic() < deadline, f"processes are left: {left}; {about}")
            time.sleep(0.02)

    def test(self):
        """The most seconds that a job took to end."""
        longest, alone, done = 0.0, None, 0
        while done < self.times:
            mark = f"{os.getpid()}-{self.what.name}-{done}"
            hit = self.disturb(mark)
            if hit is None:  # it had finished: begin again
                self.expect_undisturbed(f"before {self.what.name} {done}")
                self.checkpoint.unlink()
                self.result.unlink()
                continue
            rank, errors, seconds = hit
            about = f"{self.what.name} {done}, of rank {rank}, after {seconds:.1f} s; {errors}"
            expect(seconds < self.limit, f"too late: {about}")
            if self.what == signal.SIGSTOP:
                expect(re.search(rf"ranks? (\d+, )*{rank}(, \d+)* did not arrive", errors), f"the rank is not named: {about}")
                alone = self.saved_alone(errors, about) or alone
            self.expect_none_left(mark, about)
            longest = max(longest, seconds)
            done += 1
        subprocess.run(self.command, stdout=subprocess.DEVNULL, check=True)
        self.expect_undisturbed("in the end")
        if alone is not None:
            self.programs.run("train_image_classifier", *self.run, "--checkpoint", alone, "--resume", "--json", self.result,
                              ranks=RANKS)
            self.expect_undisturbed("in the end of what one rank has saved")
        # A rank may be killed while it saves alone, and no rank writes to that name again.
        left = [p.name for p in self.folder.iterdir() if ".tmp-" in p.name and ".rank" not in p.name]
        expect(not left, f"temporary files were left: {left}")
        return longest


def test(programs, folder):
    if not programs.mpirun:
        print("needs MPI")
        sys.exit(77)
    times = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    start = time.monotonic()
    programs.run("train_image_classifier", *RUN, "--checkpoint", folder / "first.safetensors", "--stop-after", 1, ranks=RANKS)
    seconds = time.monotonic() - start
    result = folder / "result.json"
    programs.run("train_image_classifier", *RUN, "--json", result, ranks=RANKS)
    undisturbed = load(result)
    all_series = []
    for what in (signal.SIGKILL, signal.SIGSTOP):
        (folder / what.name).mkdir()
        all_series.append(Series(programs, folder / what.name, what, times, seconds, undisturbed))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for series, longest in zip(all_series, pool.map(Series.test, all_series)):
            print(f"{times} {series.what.name}: the job ended within {longest:.1f} s of {series.limit:.1f}")


main(test)
