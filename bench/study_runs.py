# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The runs of a study: each one trains once, is kept as a JSON file and goes on from a checkpoint after an interruption.

A job is a run. It has `file` (the name of its JSON), `shown()` (its command without folders of this machine; a kept file
counts only for the same command), `minutes` (a guess) and a text. A study derives from Runs and says how a job is started
and when its result is complete.
"""
import concurrent.futures
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import records
from surroundings import ROOT, commit, describe_machine, instruction_set


class StudyError(Exception):
    """An input or a run that the study cannot use; its text is for the user."""


def read(path):
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as e:
        raise StudyError(f"{path}: not readable as JSON ({e}); delete it to run that again") from None
    if not isinstance(document, dict):
        raise StudyError(f"{path}: no JSON object, but {type(document).__name__}; delete it to run that again")
    return document


def write_text(path, text):
    """Writes aside and renames, so that a reader sees all of the file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write(path, document):
    write_text(path, records.text(document))


def unfinished(document, program, key, where):
    """Why a training program's result is not complete, empty if it is; `key`: where its metric is. Throws StudyError for a
    document that is no result of the program."""
    missing = [name for name in ("options", "history", "after", "before", key) if name not in document]
    if missing:
        raise StudyError(f"{where}: no result of {program}, it has no `{missing[0]}`; delete it to run that again")
    if document.get("diverged"):
        return f"diverged: {document['diverged']}"
    value, epochs = document[key], document["options"].get("epochs")
    if document.get("finished", True) is not True or value is None or len(document["history"]) != epochs:
        return f"{len(document['history'])} of {epochs} epochs are trained"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise StudyError(f"{where}: `{key}` is {value}, not a number; delete it to run that again")
    return ""


class Runs:
    """Runs jobs, several at a time, and keeps their results in `raw`; logs and checkpoints are in `work`."""

    environment = None  # of the programs; None: that of the study
    keeps_diverged = False  # whether a run that diverged is a result

    def __init__(self, build, work, raw):
        self.build, self.work, self.raw = build.resolve(), work.resolve(), raw
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.processes = set()
        self.named = set()  # files that do not count, each of which is named once

    # --- what a study says of its jobs ---

    def words(self, job, raw_file, checkpoint):
        """The command."""
        raise NotImplementedError

    def program(self, job):
        """The compiled program of the command, which must exist."""
        raise NotImplementedError

    def unfinished(self, job, document, where):
        """Why a result is not complete, empty if it is. Throws StudyError for a document that is no result at all."""
        raise NotImplementedError

    def told(self, job, document):
        """A finished run in words."""
        raise NotImplementedError

    def write_page(self, quiet=False):
        raise NotImplementedError

    def alone(self, job):
        """Whether the job is one whose time counts: it runs after all others, and no other at the same time."""
        return False

    def prepare(self, todo):
        """Called before the first of these jobs starts."""

    def load(self, job, raw_file):
        """What a program has written."""
        return read(raw_file)

    def same_command(self, job, command):
        return command == job.shown()

    def facts(self, job, spent):
        """What is kept with a result besides what the program wrote."""
        return {**spent, "machine": describe_machine()["cpu"], "instruction_set": instruction_set(), "commit": commit(),
                "compiler": compiler_of(self.program(job))}

    # --- results ---

    def result(self, job):
        """Of a job that is finished, by the command of now; else None."""
        path = self.raw / job.file
        if not path.is_file():
            return None
        document = read(path)
        why = self.unfinished(job, document, path)
        if not why and not self.same_command(job, document.get("command")):
            why = "it is of another command"
        if why and path not in self.named:
            self.named.add(path)
            print(f"{job}: {path} does not count: {why}", flush=True)
        return None if why else document

    def known(self, jobs):
        """{job: document} of those that are finished."""
        return {job: document for job in jobs if (document := self.result(job)) is not None}

    # --- running ---

    def train(self, job):
        """One run, from where it was interrupted; its JSON, with what it took. None if the study stops."""
        stem = self.work / job.file.removesuffix(".json")
        spent_file, raw_file, checkpoint = (stem.with_suffix(stem.suffix + end) for end in (".spent", ".raw", ".ckpt"))
        spent = read(spent_file) if spent_file.is_file() else {}
        if spent.get("command") != job.shown():  # of other options, or the first time
            for path in (checkpoint, raw_file):
                path.unlink(missing_ok=True)
            spent = {"command": job.shown(), "pieces": 0, "wall_seconds": 0.0, "cpu_seconds": 0.0, "peak_mib": 0.0}
        spent["pieces"] += 1
        raw_file.unlink(missing_ok=True)
        log_file = stem.with_suffix(stem.suffix + ".log")
        with open(log_file, "a", encoding="utf-8") as log:
            status, now = self.watch(self.words(job, str(raw_file), str(checkpoint)), log, spent, spent_file)
        if self.stopping.is_set() and status != 0:
            return None
        document = self.load(job, raw_file) if raw_file.is_file() and (status == 0 or self.keeps_diverged) else None
        diverged = document is not None and self.keeps_diverged and document.get("diverged")
        if status != 0 and not diverged:
            raise StudyError(f"{job}: exit status {status}; its output is in {log_file}")
        if document is None:
            raise StudyError(f"{job}: no result, although the exit status is 0; its output is in {log_file}")
        if why := self.unfinished(job, document, raw_file):
            raise StudyError(f"{job}: {why}; its output is in {log_file}")
        document.update(self.facts(job, now), command=job.shown())
        write(self.raw / job.file, records.of_training(document))
        for path in (spent_file, raw_file, checkpoint):
            path.unlink(missing_ok=True)
        return document

    def watch(self, words, log, spent, spent_file):
        """(exit status, what the run took so far); the latter is in a file all the time, for interruptions."""
        start, cpu = time.monotonic(), 0.0
        with self.lock:  # a signal finds either no process or one that it stops
            if self.stopping.is_set():
                return -signal.SIGTERM, spent
            # In a session of its own: Ctrl-C reaches the study alone, which sends one signal. A second one would end a run
            # without a checkpoint.
            process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                       env=self.environment, start_new_session=True)
            self.processes.add(process)
        wait, usage = 0.02, None
        while usage is None:
            with self.lock:  # so that no signal goes to the number of a process that has ended
                pid, status, finished = os.wait4(process.pid, os.WNOHANG)
                if pid != 0:
                    self.processes.discard(process)
                    process.returncode = os.waitstatus_to_exitcode(status)
            if pid != 0:
                usage = finished
                cpu = usage.ru_utime + usage.ru_stime
            else:
                time.sleep(wait)
                wait = min(5.0, 2 * wait)
                cpu = processor_seconds(process.pid) or cpu
            now = dict(spent, wall_seconds=round(spent["wall_seconds"] + time.monotonic() - start, 1),
                       cpu_seconds=round(spent["cpu_seconds"] + cpu, 1))
            if usage is not None:
                now["peak_mib"] = max(spent["peak_mib"], round(usage.ru_maxrss / 1024, 1))
            write(spent_file, now)
        return process.returncode, now

    def stop(self):
        """Asks all runs to stop at a checkpoint."""
        with self.lock:
            self.stopping.set()
            for process in self.processes:
                os.kill(process.pid, signal.SIGTERM)

    def guarded(self, job):
        """The JSON; None if the study stops; a text if the run failed."""
        if self.stopping.is_set():
            return None
        try:
            return self.train(job)
        except StudyError as e:
            return str(e)

    def run(self, jobs, at_a_time):
        """Trains what is missing; the texts of what failed."""
        known = self.known(jobs)
        todo = [job for job in jobs if job not in known]
        print(f"{len(known)} of {len(jobs)} runs are there", flush=True)
        failures = []
        if not todo:
            return failures
        for path in sorted({self.program(job) for job in todo}):
            if not path.is_file():
                raise StudyError(f"{path} is not built")
        self.prepare(todo)
        self.work.mkdir(parents=True, exist_ok=True)
        for alone, count in ((False, at_a_time), (True, 1)):
            part = [job for job in todo if self.alone(job) == alone]
            failures += self.run_part(part, count, known, lambda: self.hours_left(todo, known, at_a_time))
        return failures

    def run_part(self, jobs, at_a_time, known, hours):
        """Trains these, adds what is done to `known` and returns the texts of what failed; hours(): how long the rest takes."""
        failures = []
        pool = concurrent.futures.ThreadPoolExecutor(at_a_time)
        waiting = {pool.submit(self.guarded, job): job for job in jobs}
        try:
            for done in concurrent.futures.as_completed(waiting):
                job, document = waiting[done], done.result()
                if isinstance(document, str):
                    failures.append(document)
                    print(document, flush=True)
                elif document is not None:
                    known[job] = document
                    print(f"{job}: {self.told(job, document)}; about {hours():.1f} hours are left", flush=True)
                    self.write_page(quiet=True)
        finally:
            self.stop_if_unfinished(waiting)
            pool.shutdown(wait=True, cancel_futures=True)
        return failures

    def hours_left(self, jobs, known, at_a_time):
        """For those of the jobs that are not known."""
        left = [job for job in jobs if job not in known]
        return sum(hours_left([job for job in left if self.alone(job) == alone], known, count)
                   for alone, count in ((False, at_a_time), (True, 1)))

    def stop_if_unfinished(self, waiting):
        if not all(done.done() for done in waiting):
            self.stop()

    def show_list(self, jobs, at_a_time):
        known = self.known(jobs)
        for job in jobs:
            print(f"{job}: {'done' if job in known else f'about {job.minutes:g} minutes: ' + job.shown()}")
        left = self.hours_left(jobs, known, at_a_time)
        print(f"about {left:.1f} hours are left, with {at_a_time} at a time")


def hours_left(todo, known, at_a_time):
    """By the guesses, corrected by how long finished runs of the same guesses took."""
    timed = [(job.minutes, document["wall_seconds"] / 60) for job, document in known.items() if "wall_seconds" in document]
    guessed = sum(guess for guess, _ in timed)
    factor = sum(took for _, took in timed) / guessed if guessed > 0 else 1.0
    return factor * sum(job.minutes for job in todo) / 60 / at_a_time


def processor_seconds(pid):
    """User and system time of a process so far; None if it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compiler_of(program):
    """The compiler that a program names in its sections."""
    found = re.search(rb"(?:clang version|GCC: \([^)]*\)) [0-9.]+", program.read_bytes())
    return found.group().decode().replace("GCC: ", "GCC ") if found else "not known"


# --- command line ---

def add_arguments(parser, name, jobs):
    """Options that all studies have; `jobs`: runs at a time by default."""
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("PUFFERFISH_DATA"))
    parser.add_argument("--jobs", type=int, default=jobs, help=f"runs at a time (default {jobs})")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="where the examples are built")
    parser.add_argument("--work", "--runs", dest="work", type=pathlib.Path, help=f"checkpoints and logs (default: {name} in --build)")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "docs" / "results", help="where the page goes")
    parser.add_argument("--list", action="store_true", help="say what there is and what would run, and run nothing")
    parser.add_argument("--page", "--page-only", dest="page", action="store_true",
                        help="only write the page from the results that are there")


def parse(parser, name):
    a = parser.parse_args()
    if a.jobs < 1:
        parser.error(f"--jobs {a.jobs}: at least 1")
    a.work = a.work or a.build / name
    return a


def carry_out(name, work):
    """Calls work(), which returns the texts of failed runs, and ends the program by what happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        failures = work()
    except StudyError as e:
        raise SystemExit(f"{name}: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if failures:
        raise SystemExit(f"{name}: not all runs succeeded:\n" + "\n".join(failures))
