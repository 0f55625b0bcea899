#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/reproduce with a stand-in for the training program: shortened recipes, seconds to an accuracy, interruption, what the page
says. All numbers of runs are invented."""
import importlib.machinery
import importlib.util
import json
import sys
import unittest

from study_support import ROOT, TRAIN, Folder

import study_runs  # noqa: E402

loader = importlib.machinery.SourceFileLoader("reproduce", str(ROOT / "bench" / "reproduce"))
reproduce = importlib.util.module_from_spec(importlib.util.spec_from_loader("reproduce", loader))
sys.modules["reproduce"] = reproduce
loader.exec_module(reproduce)


def job_of(key, share=1.0):
    return reproduce.Job(reproduce.ROWS[key], 1, "bf16", "gpu", share)


class Recipes(unittest.TestCase):
    def test_shortened(self):
        shown = job_of("resnet18-paper", 0.2).shown()
        for words in ("--epochs 60 ", "--warmup-epochs 16 ", "--milestones 30,50 ", "--policy paper --first-layer 4 "):
            self.assertIn(words, shown)
        self.assertNotIn("--warmup-epochs", job_of("resnet18-dense", 0.2).shown())
        self.assertEqual(job_of("resnet18-paper", 0.2).file, "resnet18-paper-bf16-0.2-1.json")

    def test_options_are_those_of_the_examples(self):
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*pp"))
        for key in reproduce.ROWS:
            for word in job_of(key).shown().split():
                if word.startswith("--"):
                    self.assertTrue(f'"{word}"' in text or f'"{word},' in text, f"{key}: {word}")

    def test_seconds_to_an_accuracy(self):
        document = {"history": [{"test_accuracy": a} for a in (50.0, 94.0, 93.0)], "seconds_of_epochs": [2.0, 1.5, 1.5]}
        self.assertEqual(reproduce.seconds_to(document, 94.0), (3.5, True))
        self.assertEqual(reproduce.seconds_to(document, 94.5), (5.0, False))
        document["switch"] = {"after_epochs": 1, "milliseconds": 250.0}
        self.assertEqual(reproduce.seconds_to(document, 94.0), (3.75, True))


class Runs(Folder):
    script = "reproduce"

    def setUp(self):
        super().setUp()
        text = TRAIN.replace('"ms_per_step": 100.0,', '"ms_per_step": 100.0, "seconds": 4.0,').replace(
            '"finished":', '"ms_per_step_dense": 3.0, "ms_per_step_low_rank": 2.0 if hybrid else 0.0, "finished":')
        self.program("build/examples/train_image_classifier", text.format(python=sys.executable))

    def words(self, *arguments, script=None):
        words = [word for word in super().words(*arguments, script=script) if word not in ("--testbed", str(self.testbed))]
        return [*words, "--device", "cpu", "--precision", "fp32", "--seeds", "1"]

    def test_interrupted_training_goes_on_from_a_checkpoint(self):
        self.check_interruption("fast-dense-fp32-1", "--only", "fast", "--rows", "dense")

    def test_page(self):
        self.run_script("--only", "fast", "resnet18", "--rows", "dense|hybrid|paper", "--share", "0.01")
        self.assertEqual([run.split()[0] for run in self.started()],
                         ["fast-dense-fp32-1", "fast-hybrid-fp32-1", "resnet18-dense-fp32-0.01-1", "resnet18-paper-fp32-0.01-1"])
        self.run_script("--page")
        text = (self.results / "reproduce.md").read_text(encoding="utf-8")
        self.assertIn("| the paper's switch | fp32 | 0.01 | 9 | 1 | 80.00 | 94.87 | 3.00, 2.00 |", text)
        self.assertIn("| dense | fp32 | 0.01 | 9 | 1 | 80.00 | 95.09 | 3.00 |", text)
        self.assertIn("| hybrid, switch after 12 epochs | fp32 | 9 | 1 | 24.0 | 80.00 | 160.0 |", text)
        self.assertIn("--epochs 3 --milestones 2,2 ", text)

    def test_results_of_other_commands_do_not_count(self):
        job = reproduce.Job(reproduce.ROWS["fast-dense"], 1, "fp32", "cpu", 1.0)
        document = {"options": {"epochs": 1, "device": "cpu"}, "history": [{}], "after": {}, "before": {}, "accuracy": 1.0, "finished": True,
                    "command": job.shown() + " --other"}
        study_runs.write(self.results / "reproduce" / job.file, json.loads(json.dumps(document)))
        shown = self.run_script("--page", status=1)
        self.assertIn("does not count: it is of another command", shown)
        self.assertIn("nothing has run: no page is written", shown)


if __name__ == "__main__":
    unittest.main()
