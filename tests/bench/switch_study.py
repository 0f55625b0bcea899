#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/switch_study with stub programs: finished runs are kept, interrupted ones go on, failed ones stop no others; the
page from given results; results that are refused; which results of other folders are adopted. All numbers are invented."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "switch_study"
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True
import curve_runs  # noqa: E402
import study_runs  # noqa: E402
import switch_goals  # noqa: E402
import switch_jobs as jobs_of  # noqa: E402
import switch_results  # noqa: E402

loader = importlib.machinery.SourceFileLoader("switch_study", str(SCRIPT))
study = importlib.util.module_from_spec(importlib.util.spec_from_loader("switch_study", loader))
loader.exec_module(study)

# A training program: notes its start, fails where a file says so, waits for a signal where another one says so, and writes
# a result of as many epochs as it is asked for.
STUB = """#!{python}
import json, pathlib, signal, sys, time
def of(option):
    return sys.argv[sys.argv.index(option) + 1]
here = pathlib.Path(__file__).resolve().parent
checkpoint, out = pathlib.Path(of("--checkpoint")), pathlib.Path(of("--json"))
def stop(*_):
    checkpoint.write_text("a state")
    out.write_text(json.dumps(result(False)))
    sys.exit(143)
def result(finished):
    count = int(of("--epochs"))
    return {{"options": {{"epochs": count}}, "accuracy": 90.0, "before": {{"parameters": 9, "macs": 90}},
            "after": {{"parameters": 3, "macs": 30}}, "seconds": 6.0, "finished": finished, "diverged": None,
            "ms_per_step_dense": 2.0, "ms_per_step_low_rank": 1.0, "history": [{{"epoch": 1}}] * (count if finished else 1)}}
signal.signal(signal.SIGTERM, stop)
with open(here / "started", "a") as log:
    log.write(out.stem + (" resumed" if checkpoint.is_file() else " fresh") + "\\n")
if (here / ("fail-" + out.stem)).is_file():
    sys.exit("no luck")
while (here / "wait").is_file() and not checkpoint.is_file():
    time.sleep(0.01)
if (here / "garbage").is_file():
    out.write_text("{{")
else:
    out.write_text(json.dumps(result(True)))
"""


def job_of(key, seed=1):
    return next(job for job in jobs_of.all_jobs() if (job.row.key, job.seed) == (key, seed))


def options_of(job):
    """What a program would say of the job's options, by the tables of the study itself and its strings by hand."""
    flags = jobs_of.flags_of(job.words)
    options = {"ranks": 1, "threads": 1, "device": "cpu", "precision": "fp32"}
    for option, (place, default) in jobs_of.NAMES[job.group.program].items():
        value = flags.get(option, default)
        with contextlib.suppress(TypeError, ValueError):
            value = value if isinstance(value, bool) else float(value)
        *folders, last = place.split(".")
        inner = options
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    options["epochs"] = int(options["epochs"])
    options["schedule"] = f"warm-up over 1 epochs from 0.1, cosine over {options['epochs']} epochs to 0"
    return options


def document_of(job, value, first_loss=None, **more):
    """A finished result of an image classifier; `first_loss`: the training loss of its first epoch."""
    flags = jobs_of.flags_of(job.words)
    count = int(flags["--epochs"])
    rate = jobs_of.last_rate(flags, job.group.train_images) if job.group.train_images else 0.0
    history = [{"epoch": e + 1, "ms_per_step": 100.0 + e, "learning_rate": rate} for e in range(count)]
    if first_loss is not None:
        history[0].update(low_rank=False, train_loss=first_loss)
    return {"options": options_of(job), job.group.metric.key: value, "before": {"parameters": 701_466, "macs": 35_046_656},
            "after": {"parameters": 238_042, "macs": 25_214_208}, "seconds": 60.0, "finished": True, "diverged": None,
            "ms_per_step_dense": 100.0, "ms_per_step_low_rank": 80.0, "history": history, **more}


class Folder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.results, self.work, self.programs = (self.folder / name for name in ("results", "work", "build/examples"))
        self.raw = self.results / "switch"
        self.programs.mkdir(parents=True)
        for name in (jobs_of.IMAGES, jobs_of.TRANSLATOR, jobs_of.LANGUAGE):
            (self.programs / name).write_text(STUB.format(python=sys.executable), encoding="utf-8")
            (self.programs / name).chmod(0o755)

    def words(self, *arguments):
        return [sys.executable, str(SCRIPT), "--build", str(self.programs.parent), "--work", str(self.work), "--results",
                str(self.results), *arguments]

    def run_script(self, *arguments, status=0):
        done = subprocess.run(self.words(*arguments), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                              timeout=60)
        self.assertEqual(done.returncode, status, done.stdout)
        self.assertNotIn("Traceback", done.stdout)
        return done.stdout

    def started(self):
        log = self.programs / "started"
        return sorted(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else []

    def keep(self, job, value=90.0, **more):
        """Puts a result of the job into the study's folder."""
        document = document_of(job, value, command=job.shown(), cpu_seconds=120.0, machine="a machine", compiler="a compiler",
                               commit="abc", **more)
        study.write(self.raw / job.file, document)
        return document


class Runs(Folder):
    def test_a_device_trains_runs_that_count(self):
        tools = self.folder / "tools"
        tools.mkdir()
        (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'A device, 9.0'\n", encoding="utf-8")
        (tools / "nvidia-smi").chmod(0o755)
        with unittest.mock.patch.dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}"):
            self.run_script("--only", "E2", "--rows", "today", "--device", "gpu")
        known = study.read(self.raw / "E2-today-2.json")
        self.assertIn(" --device gpu ", known["command"])
        self.assertEqual([known[key] for key in ("device", "machine", "instruction_set")], ["gpu", "A device", "sm_90"])
        self.run_script("--only", "E2", "--rows", "today")
        self.assertEqual(len(self.started()), 3)  # each once
        page = (self.results / "switch.md").read_text(encoding="utf-8")
        self.assertIn("An NVIDIA device trained 3 runs in fp32 (groups: E2).", page)
        row = next(line for line in page.splitlines() if line.startswith("| today's way: plain, ratio 1/4 from layer 4"))
        self.assertTrue(row.endswith("|  |  |"), row)

    def test_finished_runs_are_kept(self):
        self.run_script("--only", "E2", "--rows", "dense|today")
        fresh = [f"E2-{name}-{seed} fresh" for name in ("dense", "today") for seed in (1, 2, 3)]
        self.assertEqual(self.started(), fresh)
        known = study.read(self.raw / "E2-today-2.json")
        self.assertEqual((known["pieces"], known["command"]), (1, job_of("E2-today", 2).shown()))
        self.assertGreater(known["peak_mib"], 1)
        self.assertGreater(known["cpu_seconds"], -1)
        self.assertEqual(list(self.work.glob("*.ckpt")), [])
        self.run_script("--only", "E2", "--rows", "dense|today")
        self.assertEqual(self.started(), fresh)
        page = (self.results / "switch.md").read_text(encoding="utf-8")
        self.assertIn("E2-new (seeds 1, 2, 3)", page)
        self.assertIn("1: 90.00, 2: 90.00, 3: 90.00 | 90.00 (90.00 to 90.00)", page)
        (self.raw / "E2-dense-3.json").unlink()
        self.run_script("--only", "E2", "--rows", "dense|today")
        self.assertEqual(self.started(), sorted([*fresh, "E2-dense-3 fresh"]))

    def test_result_of_another_command_does_not_count(self):
        job = job_of("E2-dense")
        self.keep(job)
        path = self.raw / job.file
        study.write(path, dict(study.read(path), command="another"))
        shown = self.run_script("--only", "E2", "--rows", "E2-dense", "--list")
        self.assertIn("it is of another command", shown)
        self.assertIn("E2-dense seed 1: about", shown)

    def test_interrupted_study_goes_on_from_checkpoints(self):
        (self.programs / "wait").touch()
        process = subprocess.Popen(self.words("--only", "E2", "--rows", "dense"), text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while len(self.started()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 143, shown)
        self.assertEqual(self.started(), ["E2-dense-1 fresh", "E2-dense-2 fresh"])  # two jobs at a time
        self.assertEqual([p.name for p in sorted(self.work.glob("*.ckpt"))], ["E2-dense-1.ckpt", "E2-dense-2.ckpt"])
        self.assertEqual(list(self.raw.glob("*.json")), [])
        (self.programs / "wait").unlink()
        self.run_script("--only", "E2", "--rows", "dense")
        self.assertEqual(self.started()[-3:], ["E2-dense-2 fresh", "E2-dense-2 resumed", "E2-dense-3 fresh"])
        self.assertEqual(study.read(self.raw / "E2-dense-1.json")["pieces"], 2)

    def test_failed_run_stops_no_other(self):
        (self.programs / "fail-E2-dense-1").touch()
        (self.programs / "fail-E2-dense-1.raw").touch()
        shown = self.run_script("--only", "E2", "--rows", "dense", status=1)
        self.assertIn("E2-dense seed 1: exit status 1; its output is in", shown)
        self.assertEqual(sorted(p.name for p in self.raw.glob("*.json")), ["E2-dense-2.json", "E2-dense-3.json"])

    def test_program_that_writes_no_json_is_named(self):
        (self.programs / "garbage").touch()
        shown = self.run_script("--only", "E2", "--rows", "dense", "--jobs", "1", status=1)
        self.assertIn("E2-dense-1.raw: not readable as JSON", shown)
        self.assertEqual(list(self.raw.glob("*.json")), [])

    def test_bad_arguments(self):
        self.assertIn("--data DIR", self.run_script("--only", "A", status=1) if not os.environ.get("PUFFERFISH_DATA")
                      else "--data DIR")
        self.assertIn("no row of", self.run_script("--rows", "nothing-like-it", status=2))
        self.assertIn("--jobs 0: at least 1", self.run_script("--jobs", "0", status=2))
        (self.programs / jobs_of.IMAGES).unlink()
        self.assertIn("train_image_classifier is not built", self.run_script("--only", "E2", status=1))

    def test_reduced_data_is_the_first_part_of_each_file(self):
        data, record = self.folder / "data", study.CIFAR_RECORD
        files = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        (data / "cifar10").mkdir(parents=True)
        for i, file in enumerate(files):
            (data / "cifar10" / file).write_bytes(bytes((7 * i + k // 11) % 256 for k in range(4 * record)))
        arguments = study.argparse.Namespace(build=self.programs.parent, work=self.work, results=self.results, data=data, jobs=1)
        self.addCleanup(setattr, study, "REDUCED", study.REDUCED)
        study.REDUCED = {"half": (2, 4), "tiny": (1, 5)}
        runner = study.Study(arguments)
        folder = runner.reduced("half") / "cifar10"
        for file in files:
            whole = (data / "cifar10" / file).read_bytes()
            self.assertEqual((folder / file).read_bytes(), whole[: (4 if file == "test_batch.bin" else 2) * record])
        with self.assertRaisesRegex(study.StudyError, "test_batch.bin: 12292 bytes, fewer than 5 images"):
            runner.reduced("tiny")


class Alone(unittest.TestCase):
    def test_runs_for_times_are_last_and_one_at_a_time(self):
        class Counted(study_runs.Runs):
            order, now, most = [], 0, {}

            def alone(self, job):
                return job.group.alone

            def program(self, job):
                return SCRIPT

            def told(self, job, document):
                return ""

            def write_page(self, quiet=False):
                pass

            def train(self, job):
                with self.lock:
                    self.now += 1
                    self.order.append(str(job))
                    self.most[job.group.alone] = max(self.now, self.most.get(job.group.alone, 0))
                time.sleep(0.01)
                with self.lock:
                    self.now -= 1
                return {"wall_seconds": 1.0}

        jobs = jobs_of.all_jobs({"T", "E2"})
        with tempfile.TemporaryDirectory() as folder:
            runs = Counted(*[pathlib.Path(folder)] * 3)
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(runs.run(jobs, 2), [])
        self.assertEqual(runs.order[-6:], [f"T-{name} seed {seed}" for seed in (1, 2, 3) for name in ("today", "new")])
        self.assertEqual((len(runs.order), runs.most), (len(jobs), {False: 2, True: 1}))


class Refusals(Folder):
    def check(self, text, words):
        job = job_of("E2-dense")
        path = self.raw / job.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for arguments in (["--page"], ["--only", "E2"], ["--list"]):
            shown = self.run_script(*arguments, status=1)
            self.assertIn(f"{path}: {words}", shown)
            self.assertEqual(path.read_text(encoding="utf-8"), text)
        self.assertEqual(self.started(), [])
        self.assertFalse((self.results / "switch.md").exists())

    def test_half_a_file(self):
        text = json.dumps(document_of(job_of("E2-dense"), 90.0))
        self.check(text[: len(text) // 2], "not readable as JSON")

    def test_empty_file(self):
        self.check("", "not readable as JSON")

    def test_list(self):
        self.check("[]", "no JSON object, but list")

    def test_result_without_history(self):
        document = document_of(job_of("E2-dense"), 90.0)
        del document["history"]
        self.check(json.dumps(document), "no result of train_image_classifier, it has no `history`")

    def test_accuracy_that_is_no_number(self):
        self.check(json.dumps(document_of(job_of("E2-dense"), math.nan)), "`accuracy` is nan, not a number")
        self.check(json.dumps(document_of(job_of("E2-dense"), "90")), "`accuracy` is 90, not a number")

    def test_unfinished_result_is_trained_again(self):
        job = job_of("E2-dense")
        document = self.keep(job)
        study.write(self.raw / job.file, dict(document, finished=False, history=document["history"][:3]))
        shown = self.run_script("--only", "E2", "--rows", "dense")
        self.assertIn("does not count: 3 of 20 epochs are trained", shown)
        self.assertIn("E2-dense-1 fresh", self.started())


class Page(Folder):
    def assertIn(self, member, container, msg=None):  # a page is too long for a message
        near = [line for line in container.splitlines() if line[:20] == member[:20]] if isinstance(container, str) else container
        self.assertTrue(member in container, msg or f"{member}\nnot in\n{near}")

    def page(self):
        self.run_script("--page")
        return (self.results / "switch.md").read_text(encoding="utf-8")

    def row(self, text, start, title):
        part = text[text.index(start):]
        return next(line for line in part.splitlines() if line.startswith(f"| {title} |"))

    def test_nothing_has_run(self):
        text = self.page()
        self.assertIn("**Not all has run.** Missing: A-dense (seeds 1, 2, 3)", text)
        goals = text[text.index("## Goals"): text.index("## Headline")]
        nothing = switch_results.Results({})
        self.assertEqual(goals.count("not run yet"), len(list(switch_goals.goals(nothing, {}))))
        self.assertEqual("\n".join(switch_goals.choices(nothing)).count("no run"), 6 + 6)

    def test_the_default_has_the_layers_of_todays_way_and_no_policy(self):
        defaults = [row for row in jobs_of.all_rows() if row.name == "default"]
        self.assertEqual([row.group for row in defaults], ["A", "A2", "C", "D", "E", "E2"])
        for row in defaults:
            default, today = (jobs_of.flags_of(job_of(f"{row.group}-{name}").words) for name in ("default", "today"))
            self.assertNotIn("--policy", default)
            for flags in (default, today):
                for option in ("--policy", "--test-switch", "--norm-batches"):
                    flags.pop(option, None)
            self.assertEqual(default, today)
        switch = jobs_of.expected_switch(jobs_of.flags_of(job_of("A-default").words))
        self.assertEqual((switch["policy"], switch["truncation"], switch["shared_ranks"], switch["statistics_steps"]),
                         ("uniform", "two-sided", False, 20))

    def test_the_default_is_compared_with_todays_way(self):
        for key, value in (("A-dense", 87.0), ("A-today", 85.0), ("A-default", 85.75), ("D-today", 66.0), ("D-default", 60.0)):
            self.keep(job_of(key), value)
        text = self.page()
        self.assertIn("| ResNet-18 of width 16, 12 epochs | 0.75 | points |", text)
        self.assertIn("| LSTM | 10.00 | % of perplexity |", text)
        self.assertIn("| ResNet, 12 epochs: at most 0.3 points worse than dense: by the default | 1.25 | **missed** |", text)

    def test_runs_that_trained_unlike_are_no_pair(self):
        for seed, loss in ((1, 1.5), (2, 1.25)):
            self.keep(job_of("B-dense", seed), 75.0 + seed, first_loss=1.5)
            self.keep(job_of("B-share", seed), 73.0, first_loss=loss)
            self.keep(job_of("B-share-plain", seed), 70.0, first_loss=1.25)
        text = self.page()
        self.assertIn("‡ marks differences of means over seeds", text)
        self.assertIn("| 73.00 (73.00 to 73.00) | 3.00 | ", self.row(text, "## Ablations", "two-sided, shared ranks"))
        self.assertIn("| 70.00 (70.00 to 70.00) | 6.50 ‡ | ",
                      self.row(text, "## Ablations", "plain factors, ranks of two-sided"))

    def test_other_dense_steps_are_compared_by_instruction_set(self):
        """A soft projection changes the first epoch's loss."""
        for key, loss, value in (("B-new", 1.5, 74.0), ("B-only-projection", 1.25, 74.8)):
            self.keep(job_of(key), value, first_loss=loss, instruction_set="AVX-512")
        element = "| soft projection every 100 dense steps (`--project-every 100`) |"
        self.assertIn(f"{element} 0.80 |  | one seed: no verdict |", self.page())
        job = job_of("B-only-projection")
        study.write(self.raw / job.file, dict(study.read(self.raw / job.file), instruction_set="AVX2"))
        text = self.page()
        self.assertIn(f"{element} 0.80 ‡ |  | other machines: no verdict |", text)
        self.assertIn("instruction set: AVX-512, AVX2 (recorded by 2 of 2 runs)", text)

    def test_small_differences_of_few_seeds_are_marked(self):
        for key in ("C-dense", "C-default"):
            self.keep(job_of(key), 30.0 if key == "C-dense" else 29.75)
        self.keep(job_of("A-dense"), 87.0)
        self.keep(job_of("A-later"), 86.0)
        self.keep(job_of("A-later-3"), 85.75)
        text = self.page()
        self.assertIn("by the default | 0.25 § | met |", text)
        self.assertIn("| 86.00 | 1.00 |", self.row(text, "## Headline", job_of("A-later").row.title))
        self.assertIn(f"| {job_of('A-later-3').row.title} | {job_of('A-later').row.title} | 0.25 § |", text)
        self.assertIn("No dense network was trained with a raised rate in this group", text)
        self.keep(job_of("C-dense", 2), 30.0)
        self.keep(job_of("C-default", 2), 29.75)
        self.assertIn("by the default | 0.25 (0.25 to 0.25) | met |", self.page())

    def test_raised_rates_are_compared_with_the_dense_network_of_that_rate(self):
        self.keep(job_of("B-dense"), 75.0)
        self.keep(job_of("B-dense-rate-2"), 76.0)
        self.keep(job_of("B-rate-2"), 74.5)
        self.assertIn("| two-sided with budgets, rate doubled at the switch | dense, rate doubled throughout | 1.50 |", self.page())

    def test_less_than_a_test_image_is_no_difference(self):
        for seed, new in ((1, 91.0), (2, 91.01), (3, 90.97)):
            self.keep(job_of("E-today", seed), 91.0)
            self.keep(job_of("E-new", seed), new)
            self.keep(job_of("E2-today", seed), 98.0)
            self.keep(job_of("E2-new", seed), 97.5)
        text = self.page()
        self.assertIn("| Fashion-MNIST: not worse than today's way, points better | equal: -0.01 (-0.03 to 0.01), less than one of "
                      "10,000 test images | met |", text)
        self.assertIn("| digits: not worse than today's way, points better | -0.50 (-0.50 to -0.50) | **missed** |", text)
        self.assertEqual(switch_results.spread([-0.004, 0.0]), "0.00 (0.00 to 0.00)")

    def test_rows_of_other_moments_and_rates_are_no_line_of_the_plot(self):
        families = {}
        for row in jobs_of.all_rows():
            flags = jobs_of.flags_of(row.options.split())
            if row.family and flags.get("--policy") != "cuttlefish" and "--warmup-epochs" in flags:
                of = families.setdefault((row.group, row.family), set())
                of.add((flags["--warmup-epochs"], flags.get("--switch-rate", "1")))
        self.assertEqual({len(found) for found in families.values()}, {1})

    def curve(self, system, accuracy, ms):
        """A run of bench/exchange_curves: `ms` a step before and after the switch."""
        history = [{"epoch": e + 1, "low_rank": len(ms) > 1 and e > 0, "ms_per_step": ms[min(e, len(ms) - 1)], "exchange_ms": 1.0,
                    "test_accuracy": accuracy - 3 + e} for e in range(4)]
        job = curve_runs.Job(system, 2, "100mbit")
        study.write(self.results / "exchange_curves" / job.file, {
            "options": {"epochs": 4, "batch": 128}, "history": history, "accuracy": accuracy, "exchange": {}, "minutes": 1.0,
            "before": {"bytes_per_step": 2805864}, "after": {"bytes_per_step": 952424}, "command": job.shown(), "commit": "abc",
            "machine": {"cpu": "a machine", "cores": 2, "compiler": "a compiler"},
            **({"switch": {"milliseconds": 500.0}} if len(ms) > 1 else {})})

    def test_slow_links_are_compared_with_powersgd(self):
        self.curve("powersgd", 79.55, [150.0])
        self.curve("two-sided", 79.05, [300.0, 200.0])
        self.curve("two-sided-powersgd", 79.65, [150.0, 100.0])
        goal = "at least the accuracy of PowerSGD on the dense network in at most its time"
        text = self.page()
        self.assertIn(f"| 100 Mbit/s, 2 hosts, two-sided switch: {goal} | 0.50 points less accurate, 118 s slower: PowerSGD, rank 4 "
                      "wins | **missed** |", text)
        self.assertIn(f"| 100 Mbit/s, 2 hosts, two-sided switch with PowerSGD, rank 4: {goal} | 0.10 points more accurate, 58 s "
                      "faster: two-sided switch with PowerSGD, rank 4 wins | met |", text)

    def test_differences_are_paired_by_seed(self):
        for seed, dense, new in ((1, 87.0, 86.5), (2, 87.4, 87.3)):
            self.keep(job_of("A-dense", seed), dense)
            self.keep(job_of("A-new", seed), new)
        self.keep(job_of("A-dense", 3), 50.0)  # without a counterpart: no part of the difference
        text = self.page()
        self.assertIn("| ResNet, 12 epochs: at most 0.3 points worse than dense | 0.30 (0.10 to 0.50) § | met |", text)
        self.assertIn("| ResNet: at most 1.1 times today's multiply-adds | 1.088 | met |", text)
        row = self.row(text, "## Headline", "two-sided, today's parameters and 1.1 times its multiply-adds")
        self.assertIn("| 1: 86.50, 2: 87.30 | 86.90 (86.50 to 87.30) | 0.30 (0.10 to 0.50) § |", row)
        self.assertTrue(row.endswith("| 2.0 (2.0 to 2.0) |"), row)
        self.assertIn("A-new (seed 3)", text)
        self.assertIn("Machine: a machine; instruction set: not known (recorded by 0 of 5 runs); compiler: a compiler, release build; "
                      "commits abc.", text)

    def test_switch_is_drawn_layer_by_layer(self):
        layers = [{"name": f"conv{i}", "rows": 64, "cols": 288, "rank": 10 + i, "kept_energy": 0.8, "weighted_energy": 0.99,
                   "predicted_loss": 1e-3} for i in range(5)]
        switch = {"after_epochs": 4, "milliseconds": 9.0, "predicted_loss": 0.01, "layers": layers}
        self.keep(job_of("A-new"), switch=switch)
        self.assertEqual("layers-A-new.svg" in self.page(), shutil.which("gnuplot") is not None)
        if shutil.which("gnuplot"):
            drawn = (self.results / "switch" / "layers-A-new.svg").read_text(encoding="utf-8")
            for text in ("conv0", "conv4", "rank / full rank", "predicted loss", ">14<"):
                self.assertIn(text, drawn)

    def test_trained_networks_are_averaged_over_seeds(self):
        self.assertIn("Not run yet.", self.page())
        folder = self.results / "switch"
        for seed, shift in ((1, 0.0), (2, 2.0)):
            rows = [{"share": share, "way": way, "accuracy": accuracy + shift} for share, way, accuracy in (
                (0.7, "plain", 60.0), (0.7, "two-sided", 80.0), (0.34, "plain", 20.0), (0.34, "two-sided", 50.0))]
            (folder / f"trained-{seed}.json").write_text(json.dumps(
                {"seed": seed, "accuracy": 87.0, "elements": 1234, "rows": rows, "machine": "a machine", "commit": "abc",
                 **({"cpu_seconds": 600.0} if seed == 2 else {})}), encoding="utf-8")
        text = self.page()
        self.assertIn("Seeds 1, 2; dense 87.00 (87.00 to 87.00) %, 1,234 numbers in the file. Machine: a machine; commits abc; 10.0 "
                      "processor minutes a seed, of 1 of 2 seeds; of the others it is not recorded.", text)
        self.assertIn("| numbers that are left | plain | two-sided |", text)
        self.assertIn("| 34 % | 21.00 (20.00 to 22.00) | 51.00 (50.00 to 52.00) |", text)

    def test_losses_at_the_switch(self):
        def switch(before, after, estimated):
            return {"after_epochs": 4, "milliseconds": 9.0, "accuracy_before": before, "accuracy_after": after,
                    "accuracy_estimated": estimated, "predicted_loss": 0.01}
        self.keep(job_of("A-plain"), switch=switch(74.0, 54.0, 70.0))
        self.keep(job_of("A-new"), switch=switch(74.0, 63.9, 75.0))
        self.keep(job_of("A-new", 2), switch=switch(74.0, 0.0, 0.0))  # without a counterpart
        text = self.page()
        self.assertIn("| ResNet, 12 epochs, right after the switch, statistics as they were: at most half of plain truncation's "
                      "loss in accuracy | 10.10 against 20.00 points, 1 seed | **missed** |", text)
        self.assertIn("| ResNet, 12 epochs, right after the switch, re-estimated: at most half of plain truncation's loss in "
                      "accuracy | -1.00 against 4.00 points, 1 seed | met |", text)
        self.assertIn("| 74.00; 54.00; 70.00 | 0.0100 | 4 |", text)

    def test_elements_that_do_not_pay_are_named(self):
        for seed in (1, 2, 3):
            self.keep(job_of("B-none", seed), 74.0)
            self.keep(job_of("B-new", seed), 74.0 + 0.02 * seed)
            self.keep(job_of("B-only-carry", seed), 75.0)
            self.keep(job_of("B-only-ramp", seed), 70.0)
            self.keep(job_of("B-only-frobenius", seed), 73.0 + 0.5 * seed)
            self.keep(job_of("B-only-annealing", seed), 73.5)
        for seed in (1, 2):
            self.keep(job_of("B-only-extra-norm", seed), 74.3)
        text = self.page()
        self.assertIn("| carried optimizer state (`--carry-state`) | 0.96 (0.94 to 0.98) |  | pays |", text)
        self.assertIn("(`--ramp-steps 100`) | -4.04 (-4.06 to -4.02) |  | **does not pay**: it costs accuracy |", text)
        self.assertIn("**does not pay**: nothing beyond the seeds' spread |", text)
        self.assertIn("(`--project-every 100`) |  |  | not run yet |", text)
        self.assertIn("(`--anneal-epochs 1`) | -0.54 (-0.56 to -0.52) |  | **does not pay**: it costs accuracy |", text)
        self.assertIn("(`--extra-norm 20`) | 0.27 (0.26 to 0.28) § |  | too few seeds: no verdict |", text)

    def test_perplexities_are_compared_by_percent(self):
        for key, value in (("D-dense", 60.0), ("D-new", 60.9)):
            job = job_of(key)
            self.keep(job, value)
        self.assertIn("| LSTM: at most 1 % of perplexity worse than dense | 1.50 | **missed** |", self.page())

    def test_full_width_shows_times(self):
        """Statistics cost what the second epoch is slower than the first, less what that is of today's way."""
        for seed, slow in ((1, 102.0), (2, 103.02)):
            for key in ("F-dense", "F-today", "F-new"):
                job, new = job_of(key, seed), key == "F-new"
                more = {} if key == "F-dense" else {"switch": {"milliseconds": 30.0 if new else 10.0 * seed}}
                document = self.keep(job, 20.0, peak_mib=1234.0, **more)
                if new:
                    document["history"][1]["ms_per_step"] = slow
                    study.write(self.raw / job.file, document)
        text = self.page()
        self.assertIn("| dense | 238,042 | 25,214,208 | 100 (100 to 100) | 101 (101 to 101) |  | 1.0 (1.0 to 1.0) |  | 1234 "
                      "(1234 to 1234) | 2.0 (2.0 to 2.0) |", text)
        self.assertIn("| full width: switch at most 1.5 times today's | 2.250 (1.500 to 3.000) | **missed** |", text)
        self.assertIn("| full width: statistics at most 2 % of the time of a warm-up step | 1.50 (0.99 to 2.00) % | met |", text)


class Adoption(Folder):
    def adopt(self, *documents, arguments=("--page",)):
        source = self.folder / "elsewhere"
        source.mkdir(exist_ok=True)
        for i, document in enumerate(documents):
            (source / f"run-{i}.json").write_text(json.dumps(document), encoding="utf-8")
        return self.run_script("--adopt", str(source), *arguments)

    def switch_of(self, job):
        wanted = jobs_of.expected_switch(jobs_of.flags_of(job.words))
        return dict({k: v for k, v in wanted.items() if k != "fixed"}, moment="epoch" if wanted["fixed"] else "by measurement")

    def test_every_job_knows_its_own_options(self):
        """And no other image job of the same seed has the same ones."""
        images = [job for job in jobs_of.all_jobs() if job.group.program == jobs_of.IMAGES and job.seed == 1]
        for job in images:
            document = document_of(job, 90.0)
            document["options"]["switch"] = self.switch_of(job)
            self.assertEqual([str(other) for other in images if not jobs_of.difference(other, document)], [str(job)])

    def test_results_of_the_same_options_are_adopted(self):
        job = job_of("B-only-carry", 2)
        document = document_of(job, 74.5)
        document["options"]["switch"] = self.switch_of(job)
        shown = self.adopt(document)
        self.assertIn("B-only-carry seed 2: adopted from", shown)
        known = study.read(self.raw / job.file)
        self.assertEqual((known["adopted_from"], known["command"], known["accuracy"]), ("run-0.json", job.shown(), 74.5))
        text = (self.results / "switch.md").read_text(encoding="utf-8")
        self.assertIn("1 of 1 results were adopted", text)
        self.assertIn("| 1.0 † |", text)
        self.assertIn("there is a result already", self.adopt(document))

    def test_older_results_are_of_the_papers_way(self):
        job = job_of("B-today")
        self.assertIn("B-today seed 1: adopted", self.adopt(document_of(job, 74.0, switch={"layers": [{"rank": 4}]})))

    def test_older_results_with_weighted_truncation_are_not(self):
        document = document_of(job_of("B-today"), 74.0, switch={"layers": [{"rank": 4, "weighted_energy": 0.9}]})
        self.assertIn("no job has these options", self.adopt(document))

    def test_data_sets_are_told_apart_by_their_number_of_steps(self):
        job = job_of("B-dense")
        document = document_of(job, 74.0)
        self.assertEqual(jobs_of.difference(job, document), "")
        document["history"][-1]["learning_rate"] = jobs_of.last_rate(jobs_of.flags_of(job.words), 50_000)
        self.assertIn("images", jobs_of.difference(job, document))
        self.assertIn("no job has these options", self.adopt(document))

    def test_what_differs_is_not_adopted(self):
        def changed(**more):
            document = document_of(job_of("B-dense"), 74.0)
            document["options"].update(more)
            return document
        unfinished = dict(document_of(job_of("B-dense"), 74.0), finished=False)
        shown = self.adopt(changed(ranks=2), changed(weight_decay=0.001), changed(seed=7), changed(flip=False),
                           changed(precision="bf16"), unfinished, {"options": {}})
        self.assertEqual(shown.count("no job has these options"), 7)
        self.assertEqual(list(self.raw.glob("*.json")), [])

    def test_broken_files_are_passed_over(self):
        (self.folder / "elsewhere").mkdir()
        (self.folder / "elsewhere" / "a.json").write_text("{", encoding="utf-8")
        shown = self.adopt(document_of(job_of("B-dense"), 74.0))
        self.assertIn("a.json: not readable as JSON", shown)
        self.assertIn("B-dense seed 1: adopted", shown)


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()) if "-q" in sys.argv else contextlib.nullcontext():
        unittest.main()
