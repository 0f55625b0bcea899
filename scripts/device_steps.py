# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of tests and measurements that have little time: each under its own time-out, several at once, each result written
as soon as it is there. For scripts/device_run and tests/gpu/sanitize."""
import concurrent.futures
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

SKIPPED = 77  # exit status of a program that has nothing to run on
FOUND = 86  # exit status that compute-sanitizer is told to end with where its tool reports an error
KEPT = 200_000  # characters of a step's output that are written: its first and its last half

# A step and what it starts are one group of processes, which ends as one.
GROUP = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
RUNNING = set()  # leaders of the groups


class Step:
    """One command. `facts(text)` turns its output into values for the record; `expect` is a text without which the step has
    failed whatever its exit status."""

    def __init__(self, name, command, seconds, env=None, stdin="", facts=None, expect=None, cwd=None):
        self.name, self.command, self.seconds = name, [str(c) for c in command], seconds
        self.env, self.stdin, self.facts, self.expect, self.cwd = env or {}, stdin, facts, expect, cwd

    def run(self, seconds):
        """A dictionary: status is passed, failed, late (killed after its time), skipped or missing (no such program)."""
        start = time.monotonic()
        result = {"name": self.name, "command": " ".join(self.command)}
        try:
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, errors="replace", env={**os.environ, **self.env}, cwd=self.cwd, **GROUP)
        except OSError as why:
            return {**result, "status": "missing", "seconds": 0.0, "text": str(why)}
        RUNNING.add(process.pid)
        late = threading.Event()

        def end():
            late.set()
            end_group(process.pid)

        timer = threading.Timer(seconds, end)
        timer.start()
        text, _ = process.communicate(self.stdin)
        timer.cancel()
        RUNNING.discard(process.pid)
        end_group(process.pid)  # what the command has left running
        code = process.returncode
        status = "late" if late.is_set() else {0: "passed", SKIPPED: "skipped"}.get(code, "failed")
        if status == "passed" and self.expect is not None and self.expect not in text:
            status, text = "failed", text + f"\n(no {self.expect!r} in the output)\n"
        result.update(status=status, code=code, seconds=round(time.monotonic() - start, 2), text=text)
        if self.facts and status == "passed":
            try:
                result["facts"] = self.facts(text)
            except (ValueError, KeyError, IndexError, AttributeError, OSError) as why:
                result.update(status="failed", text=f"{text}\n(the output is not what was expected: {why!r})\n")
        return result


def end_group(leader):
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass


def end_all(number, _):
    """A signal ends the steps, too: what they leave would keep the device busy."""
    for leader in list(RUNNING):
        end_group(leader)
    os._exit(128 + number)


class Record:
    """NAME.log and NAME.json in a folder, both complete after every step."""

    def __init__(self, folder, name, **about):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log, self.json = self.folder / f"{name}.log", self.folder / f"{name}.json"
        self.log.write_text("", encoding="utf-8")
        self.about = {"run": name, **about}
        self.steps = []
        self.lock = threading.Lock()
        self.start = time.monotonic()

    def tell(self, **more):
        with self.lock:
            self.about.update(more)
            self.write()

    def add(self, result):
        text = result.pop("text", "")
        if len(text) > KEPT:
            text = text[:KEPT // 2] + f"\n[... {len(text) - KEPT} characters left out ...]\n" + text[-KEPT // 2:]
        with self.lock:
            result["at"] = round(time.monotonic() - self.start, 1)
            self.steps.append(result)
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"==== {result['name']}: {result['status']}, {result['seconds']} s\n$ {result['command']}\n{text}\n")
            self.write()
            print(f"[{result['at']:6.1f} s] {result['name']}: {result['status']}, {result['seconds']} s", flush=True)
            if result["status"] in ("failed", "late", "missing"):
                print("\n".join("    " + line for line in interesting(text)), flush=True)

    def write(self):
        part = self.json.with_suffix(".part")
        part.write_text(json.dumps({**self.about, "seconds": round(time.monotonic() - self.start, 1), "steps": self.steps},
                                   indent=1) + "\n", encoding="utf-8")
        part.replace(self.json)

    def counts(self):
        result = {}
        for step in self.steps:
            result[step["status"]] = result.get(step["status"], 0) + 1
        return result


def interesting(text, most=12):
    """Lines that say what went wrong, else the last ones."""
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "ERROR" in line or "error" in line or line.startswith("=========")]
    return (said or lines[-most:])[:most]


def run_steps(record, steps, jobs=1, deadline=None):
    """Runs the steps, `jobs` at a time, in their order. No step runs beyond the deadline (of time.monotonic); a step that it
    leaves less than three seconds is recorded as `no time`. Returns the results."""

    def one(step):
        left = math.inf if deadline is None else deadline - time.monotonic()
        if left < 3:
            result = {"name": step.name, "command": " ".join(step.command), "status": "no time", "seconds": 0.0}
        else:
            result = step.run(min(step.seconds, left))
        record.add(result)
        return result

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end_all)
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        return list(pool.map(one, steps))


def find_program(name, *places):
    """Where a program of the toolkit is: by the environment variable of its name in capitals, in PATH, or in a place."""
    for candidate in [os.environ.get(name.upper().replace("-", "_")), shutil.which(name), *map(str, places)]:
        if candidate and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    return None


def find_sanitizer():
    cuda = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return os.environ.get("SANITIZER") or find_program(
        "compute-sanitizer", cuda / "bin/compute-sanitizer", cuda / "compute-sanitizer/compute-sanitizer",
        *sorted(pathlib.Path("/opt/nvidia").glob("*/compute-sanitizer")))


def sanitizer_step(sanitizer, tool, program, name, seconds, env=None):
    """The device tests of one file, watched by one tool. Arenas have red zones, because memory that an arena gives out in
    pieces is one allocation to the tool."""
    return Step(f"{tool}: {name}",
                [sanitizer, "--tool", tool, "--error-exitcode", FOUND, "--print-limit", 10, program, "--red-zones",
                 f"--source-file=*/{name}.cpp"], seconds, env=env, expect="ERROR SUMMARY" if tool != "racecheck" else "SUMMARY")
