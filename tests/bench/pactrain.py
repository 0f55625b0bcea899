#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/pactrain and bench/exchange_curves with stand-ins for the test bed and the training program: runs that both share, that
are interrupted or fail; times to an accuracy; equal bytes; what the pages say. All numbers of runs are invented."""
import math
import unittest

from study_support import ROOT, Folder

import curve_runs  # noqa: E402
import study_runs  # noqa: E402
from curve_runs import SYSTEMS, Job  # noqa: E402


def result_of(accuracies, ms=100.0, exchange_ms=40.0, switch=None, rare=None, pruning=None, payload=2_805_864):
    """A finished result; `switch`: its milliseconds, after the first epoch."""
    history = [{"epoch": e + 1, "low_rank": switch is not None and e > 0, "test_accuracy": a, "ms_per_step": ms,
                "exchange_ms": exchange_ms} for e, a in enumerate(accuracies)]
    exchange = {"payload_bytes": payload, "rare": rare, "pruning": pruning and {"options": pruning}}
    result = {"options": {"epochs": len(history), "batch": 128}, "accuracy": accuracies[-1], "before": {"bytes_per_step": 2_805_864},
              "after": {"bytes_per_step": payload}, "exchange": exchange, "history": history, "finished": True, "diverged": None}
    return result if switch is None else {**result, "switch": {"milliseconds": switch}}


class Results(unittest.TestCase):
    def test_seconds(self):
        # 391 steps of 100 ms
        self.assertEqual(curve_runs.seconds_of(result_of([50, 60])), [39.1, 78.2])
        self.assertEqual(curve_runs.seconds_of(result_of([50, 60, 70], switch=1500.0)), [39.1, 79.7, 118.8])
        rare = {"payload_bytes_a_step": 1000.4, "exposed_ms": 10.0}
        self.assertEqual(curve_runs.seconds_of(result_of([50, 60], rare=rare)), [43.01, 86.02])

    def test_time_to_an_accuracy(self):
        result = result_of([50, 70, 60, 80])
        self.assertAlmostEqual(curve_runs.time_to(result, 25), 39.1 / 2)
        self.assertAlmostEqual(curve_runs.time_to(result, 65), 39.1 * 1.75)
        self.assertAlmostEqual(curve_runs.time_to(result, 75), 39.1 * 3.75)
        self.assertAlmostEqual(curve_runs.time_to(result, 80), 39.1 * 4)
        self.assertIsNone(curve_runs.time_to(result, 80.1))

    def test_payloads(self):
        dense, half = 2_805_864, 2_805_864 - 4 * 349_528
        self.assertEqual(curve_runs.payloads(result_of([1, 2])), f"{dense:,}")
        self.assertEqual(curve_runs.payloads(result_of([1, 2], switch=1.0, payload=952_424)), f"{dense:,}, 952,424")
        self.assertEqual(curve_runs.payloads(result_of([1, 2], rare={"payload_bytes_a_step": 1000.4, "exposed_ms": 1.0})), "1,000")
        pruning = "ratio 0.5 by GraSP, 10 samples a class, temperature 200, at epoch "
        self.assertEqual(curve_runs.payloads(result_of([1, 2], pruning=pruning + "0", payload=half)), f"{half:,}")
        self.assertEqual(curve_runs.payloads(result_of([1, 2], pruning=pruning + "1", payload=half)), f"{dense:,}, {half:,}")
        self.assertEqual(curve_runs.payloads(result_of([1, 2], pruning=pruning + "0", switch=1.0, payload=480_000)),
                         f"{half:,}, 480,000")

    def test_equal_bytes(self):
        # Convolutions and the last layer of the network of width 16, whose stem has a batch norm too.
        weights = 27 * 16 + 10 * 128
        for inputs, planes in ((16, 16), (16, 32), (32, 64), (64, 128)):
            weights += 9 * planes * (inputs + 3 * planes) + (inputs * planes if inputs != planes else 0)
        self.assertEqual(weights, curve_runs.WEIGHTS)
        self.assertEqual(701_466 - math.floor(float(curve_runs.EQUAL_BYTES) * weights), 238_106)
        self.assertIn(f"--prune-ratio {curve_runs.EQUAL_BYTES} --prune-epoch 1", SYSTEMS["pactrain-equal"].options)

    def test_options_are_those_of_the_examples(self):
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*pp"))
        for name, system in SYSTEMS.items():
            for word in system.options.split():
                if word.startswith("--"):
                    self.assertTrue(f'"{word}"' in text or f'"{word},' in text, f"{name}: {word}")


class Runs(Folder):
    script = "pactrain"

    def page(self, name="pactrain"):
        return (self.results / f"{name}.md").read_text(encoding="utf-8")

    def keep(self, system, rate, result):
        job = Job(system, 2, rate)
        study_runs.write(self.results / "exchange_curves" / job.file, {
            **result, "command": job.shown(), "minutes": 4.0, "commit": "abc",
            "machine": {"cpu": "a processor", "cores": 2, "compiler": "a compiler"}})

    def test_runs_are_shared(self):
        self.run_script("--only", "dense", "pufferfish", "--rates", "100mbit")
        fresh = ["dense-2-hosts-100mbit fresh", "pufferfish-2-hosts-100mbit fresh"]
        self.assertEqual(self.started(), fresh)
        self.run_script("--only", "dense", "pufferfish", "powerfish", script="exchange_curves")
        self.assertEqual(self.started(), sorted([*fresh, "powerfish-2-hosts-100mbit fresh"]))
        text = self.page("exchange_curves")
        self.assertIn("Missing: PowerSGD, rank 4; Signum; ", text)
        self.assertIn("| dense | 2,805,864 | 100.0 | 40.0 | 156 | 1.00 | 80.00 |", text)
        self.assertIn("| Pufferfish | 2,805,864, 952,424 | 100.0, 100.0 | 40.0, 40.0 | 157 | 1.00 | 80.00 |", text)

    def test_rare_exchanges_are_counted(self):
        self.run_script("--only", "pufferfish-rare", script="exchange_curves")
        self.assertIn("| Pufferfish, rare exchanges | 350,000 | 103.0, 103.0 | 3.0, 3.0 | 162 | - | 80.00 |", self.page("exchange_curves"))

    def test_interrupted_study_goes_on_from_a_checkpoint(self):
        self.check_interruption("bf16-2-hosts-1gbit", "--only", "bf16", "--rates", "1gbit")

    def test_failed_run_stops_no_other(self):
        (self.train.parent / "fail-bf16-2-hosts-100mbit").touch()
        shown = self.run_script("--only", "bf16", "--rates", "100mbit", "1gbit", status=1)
        self.assertIn("dense, bf16, 2 hosts, 100mbit: exit status 1", shown)
        self.assertEqual([p.name for p in (self.results / "exchange_curves").glob("*.json")], ["bf16-2-hosts-1gbit.json"])

    def test_test_bed_without_root(self):
        self.program("testbed", "#!/bin/sh\necho 'skipped: network namespaces need root'\n")
        shown = self.run_script("--only", "bf16", "--rates", "1gbit", status=1)
        self.assertIn("no result, although the exit status is 0; its output is in", shown)
        self.assertFalse((self.results / "pactrain.md").exists())

    def test_nothing_has_run(self):
        self.assertIn("nothing has run: no page is written", self.run_script("--page", status=1))
        self.assertFalse((self.results / "pactrain.md").exists())

    def test_older_commands(self):
        self.keep("pufferfish", "1gbit", result_of([50, 60, 70, 80]))
        path = self.results / "exchange_curves" / "pufferfish-2-hosts-1gbit.json"
        document = study_runs.read(path)
        study_runs.write(path, {**document, "command": document["command"].replace("--policy paper ", "")})
        self.assertIn("Pufferfish, 2 hosts, 1gbit: done", self.run_script("--list", "--only", "pufferfish"))
        study_runs.write(path, {**document, "command": document["command"].replace("--lr 0.1", "--lr 0.2")})
        shown = self.run_script("--list", "--only", "pufferfish")
        self.assertIn("does not count: it is of another command", shown)
        self.assertIn("Pufferfish, 2 hosts, 1gbit: about 6 minutes", shown)

    def test_committed_runs_still_count(self):
        done = self.run_script("--list", "--rates", "100mbit", "--results", str(ROOT / "docs" / "results"))
        self.assertIn("dense, 2 hosts, 100mbit: done\n", done)
        self.assertIn("\nPufferfish, 2 hosts, 100mbit: done\n", done)

    def test_page(self):
        rate = "500mbit"
        self.keep("dense", rate, result_of([50, 60, 70, 80], ms=200.0, exchange_ms=140.0))
        self.keep("pactrain-0.5", rate, result_of([50, 60, 70, 79], ms=150.0, exchange_ms=90.0, payload=1_407_752,
                                                  pruning="ratio 0.5 by GraSP, at epoch 0"))
        self.keep("topk-0.1", rate, result_of([50, 60, 70, 79.5], ms=120.0, payload=561_000))
        self.keep("pufferfish", rate, result_of([50, 60, 70, 78], switch=0.0, payload=952_424, exchange_ms=60.0))
        self.keep("pactrain-equal", rate, result_of([50, 60, 70, 77], ms=140.0, exchange_ms=60.0, payload=952_424,
                                                    pruning="ratio 0.662838 by GraSP, at epoch 1"))
        self.run_script("--page")
        text = self.page()
        here = text[text.index(f"## 2 hosts, {rate}"):]
        # To 75 %: dense after 3.5 epochs of 78.2 s, PacTrain after 3.556 of 58.65 s.
        self.assertIn("| dense | 2,805,864 | 200.0 | 140.0 | 313 | 274 | 305 | 1.00 | 80.00 |", here)
        self.assertIn("| PacTrain, 50 % pruned | 1,407,752 | 150.0 | 90.0 | 235 | 209 | 235 | 1.31 | 79.00 |", here)
        self.assertIn("| Pufferfish | 2,805,864, 952,424 | 100.0 | 60.0 | 156 | 142 | not reached | 1.93 | 78.00 |", here)
        self.assertIn("| PacTrain, 80 % pruned | not run |", here)
        self.assertIn("- PacTrain, 50 % pruned **loses**: faster and more accurate: top-k, 10 %.", here)
        self.assertNotIn("- top-k, 10 % **loses**", here)
        self.assertIn(f"| {rate} | PacTrain, Pufferfish's bytes | 2,805,864, 952,424 | 140.0 | 80.0 | 219 | 77.00 |", text)
        self.assertIn(f"- {rate}: PacTrain, Pufferfish's bytes takes 1.40 times as long as Pufferfish and is 1.00 points less accurate.",
                      text)
        self.assertIn(f"| {rate} | PacTrain, 50 % pruned | not run | **0.80** | not run |", text)
        self.assertIn("PacTrain, 80 % pruned, 2 hosts, 500mbit; ", text)
        self.assertIn("Machine: a processor, 2 cores; a compiler; commits abc.", text)


if __name__ == "__main__":
    unittest.main()
