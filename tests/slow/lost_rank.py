#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""lost_rank.py PROGRAMS MPIRUN [TIMES]

One of four ranks of a training run is killed, or stopped, at a random moment, TIMES (20) times each. After a kill the
job must end within five seconds; after a stop the others must say which rank did not arrive and end the job, and one
of them saves the run by itself: a file that is whole and can be gone on from. Every time no process is left, no half-
written file, and the exit status is zero only if the run had ended with the parameters of an undisturbed one. In the
end the run goes on from its last checkpoint, and from what was saved last by one rank, to the very parameters of a
run that nobody disturbed.
"""
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
TIMEOUT = 2.0  # seconds; a step takes milliseconds, but the ranks are more than the cores
RUN = ["--epochs", "60", "--warmup-epochs", "30", "--width", "8", "--batch", "32", "--threads", "1", "--progress", "none",
       "--timeout", str(TIMEOUT)]


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


def disturb(command, what, chance, mark):
    """Starts the job, hits a rank, waits for the end. (rank, errors, seconds it took); None if training had
    ended before: the caller checks its results."""
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "PUFFERFISH_LOST_RANK": mark})
    while len(ranks := processes_of(mark)) < RANKS and job.poll() is None:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.3, 1.5))
    rank = chance.randrange(RANKS)
    if job.poll() is not None:
        return None
    try:
        os.kill(ranks[rank], what)
    except ProcessLookupError:  # the rank has ended, and the job is about to
        job.communicate(timeout=60)
        return None
    start = time.monotonic()
    try:
        _, errors = job.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        # Stopped when training was over: nobody waits for a rank then but MPI_Finalize, which has no timeout.
        os.kill(ranks[rank], signal.SIGCONT)
        _, errors = job.communicate(timeout=60)
        if job.returncode != 0:
            sys.exit(f"{what.name} of rank {rank}: the job did not end by itself; {errors}")
        return None
    if job.returncode == 0:  # the rank had ended, and the launcher had not asked for its status yet
        return None
    return rank, errors, time.monotonic() - start


def saved_alone(programs, folder, errors, about):
    """A copy of what one of the ranks that were left has saved; None where the switch was being made."""
    named = re.search(r"saved the run by itself: --checkpoint (\S+) --resume", errors)
    if named is None:
        expect("in the middle of the switch" in errors, f"nobody has saved: {about}")
        return None
    saved = pathlib.Path(named.group(1))
    data = saved.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = header.pop("__metadata__")
    expect_equal(max(t["data_offsets"][1] for t in header.values()), len(data) - 8 - length, f"bytes of {saved}, {about}")
    expect("alone" in facts["training.record"], "the record says who has saved")
    copy = folder / "alone.safetensors"
    copy.write_bytes(data)
    saved.unlink()
    programs.run("train_image_classifier", *RUN, "--checkpoint", copy, "--resume", "--stop-after", 3, ranks=RANKS)
    copy.write_bytes(data)
    return copy


def test(programs, folder):
    if not programs.mpirun:
        print("needs MPI")
        sys.exit(77)
    times = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    chance = random.Random(2)
    checkpoint, result = folder / "run.safetensors", folder / "result.json"
    programs.run("train_image_classifier", *RUN, "--json", result, ranks=RANKS)
    undisturbed = load(result)
    result.unlink()
    command = programs.command("train_image_classifier", *RUN, "--checkpoint", checkpoint, "--checkpoint-every", "5",
                               "--resume", "--json", result, ranks=RANKS)
    longest, alone = {}, None
    for what in (signal.SIGKILL, signal.SIGSTOP):
        done = 0
        while done < times:
            mark = f"{os.getpid()}-{what.name}-{done}"
            hit = disturb(command, what, chance, mark)
            if hit is None:  # it had finished: begin again
                expect_equal(digests(load(result)), digests(undisturbed), f"parameters before {what.name} {done}")
                checkpoint.unlink()
                result.unlink()
                continue
            rank, errors, seconds = hit
            about = f"{what.name} {done}, of rank {rank}, after {seconds:.1f} s; {errors}"
            expect(seconds < (5.0 if what == signal.SIGKILL else 1.5 * TIMEOUT + 5.0), f"too late: {about}")
            if what == signal.SIGSTOP:
                expect(re.search(rf"ranks? (\d+, )*{rank}(, \d+)* did not arrive", errors), f"the rank is not named: {about}")
                alone = saved_alone(programs, folder, errors, about) or alone
            time.sleep(0.2)
            expect(not processes_of(mark), f"processes are left: {about}")
            longest[what.name] = max(longest.get(what.name, 0.0), seconds)
            done += 1
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    expect_equal(digests(load(result)), digests(undisturbed), "parameters in the end")
    if alone is not None:
        programs.run("train_image_classifier", *RUN, "--checkpoint", alone, "--resume", "--json", result, ranks=RANKS)
        expect_equal(digests(load(result)), digests(undisturbed), "parameters in the end of what one rank has saved")
    # A rank may be killed while it saves alone, and nobody writes to that name again.
    left = [p.name for p in folder.iterdir() if ".tmp-" in p.name and ".rank" not in p.name]
    expect(not left, f"left behind: {left}")
    print(", ".join(f"{times} {name}: the job ended within {seconds:.1f} s" for name, seconds in longest.items()))


main(test)
