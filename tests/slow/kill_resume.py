#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kill_resume.py PROGRAMS MPIRUN [KILLS]

A training run with a checkpoint every few steps is killed by SIGKILL at random moments, a hundred times (KILLS), and
resumed each time. Every checkpoint it leaves must be whole, and the run must end with the very parameters of a run
without disturbance: before, at and after the switch.
"""
import pathlib
import random
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from support import digests, expect, expect_equal, load, main  # noqa: E402

RUN = ["--epochs", "40", "--warmup-epochs", "20", "--width", "8", "--batch", "32", "--threads", "1", "--progress", "none"]


def test(programs, folder):
    kills = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    chance = random.Random(1)
    checkpoint, result = folder / "run.safetensors", folder / "result.json"
    start = time.monotonic()
    programs.run("train_image_classifier", *RUN, "--json", result)
    undisturbed, seconds = load(result), time.monotonic() - start
    result.unlink()
    command = programs.command("train_image_classifier", *RUN, "--checkpoint", checkpoint, "--checkpoint-every", "3",
                               "--resume", "--json", result)
    killed = finished = 0
    while killed < kills:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            # Long enough to get somewhere, short enough to be killed many times.
            _, errors = process.communicate(timeout=chance.uniform(0.05, max(0.3, 4 * seconds / kills)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            continue
        expect_equal(process.returncode, 0, f"exit status after {killed} kills; {errors}")
        expect_equal(digests(load(result)), digests(undisturbed), f"parameters of run {finished}, after {killed} kills")
        finished += 1
        checkpoint.unlink()
        result.unlink()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    expect_equal(digests(load(result)), digests(undisturbed), f"parameters after {killed} kills")
    left = [p.name for p in folder.iterdir() if ".tmp-" in p.name]
    expect(not left, f"temporary files were left: {left}")
    print(f"{killed} kills, {finished + 1} runs finished, all with the parameters of the undisturbed run")


main(test)
