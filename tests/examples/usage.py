#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""usage.py PROGRAM...: every program answers --help with 0 and a text, and an option that it does not know with 2, a
line that begins with its name or its usage, and no abort. Programs that need an argument do so without any, too."""
import pathlib
import subprocess
import sys

from support import expect, expect_equal

NEED_ARGUMENTS = {"train_digits", "predict", "factorize_weights", "factorize_onnx", "run_weights"}


def run(program, *arguments):
    return subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, check=False, timeout=60)


def check(program):
    name = pathlib.Path(program).name
    helped = run(program, "--help")
    expect_equal(helped.returncode, 0, f"{name} --help: exit status ({helped.stderr})")
    expect(name in helped.stdout and not helped.stderr, f"{name} --help prints:\n{helped.stdout}{helped.stderr}")
    for arguments in [["--no-such-option"], *([[]] if name in NEED_ARGUMENTS else [])]:
        refused = run(program, *arguments)
        text = refused.stdout + refused.stderr
        expect_equal(refused.returncode, 2, f"{name} {arguments}: exit status ({text})")
        expect(text.startswith((f"{name}: ", f"usage: {name}")) and "Traceback" not in text, f"{name} {arguments} prints:\n{text}")


# examples/run answers before it installs or builds anything.
script = pathlib.Path(__file__).resolve().parents[2] / "examples" / "run"
for option in ["--help", "-h"]:
    answer = subprocess.run([script, option], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=5)
    expect_equal(answer.returncode, 0, f"run {option}: exit status ({answer.stderr})")
    expect(answer.stdout.startswith("Usage: examples/run"), f"run {option} prints:\n{answer.stdout}")
for path in sys.argv[1:]:
    check(path)
print(f"{len(sys.argv) - 1} programs")
