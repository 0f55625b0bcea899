#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/tickets with stand-ins for the three programs: costs of levels, equal sizes, interruption, what the page says. All numbers
of runs are invented."""
import importlib.machinery
import importlib.util
import sys
import unittest

from study_support import ROOT, Folder

import study_runs  # noqa: E402
import tickets_page  # noqa: E402
from tickets_page import MACS, PARAMETERS, ROWS, STEPS, Point  # noqa: E402

loader = importlib.machinery.SourceFileLoader("tickets", str(ROOT / "bench" / "tickets"))
tickets = importlib.util.module_from_spec(importlib.util.spec_from_loader("tickets", loader))
sys.modules["tickets"] = tickets
loader.exec_module(tickets)

DENSE_BYTES = 4 * 1_255_546


def trained(accuracy, parameters, macs, bytes_per_step, cpu=240.0):
    """A result of train_image_classifier or early_bird."""
    history = [{"epoch": e + 1, "test_accuracy": accuracy, "bytes_per_step": b} for e, b in enumerate(bytes_per_step)]
    size = {"parameters": parameters, "macs": macs, "bytes_per_step": bytes_per_step[-1]}
    return {"options": {"epochs": len(history)}, "accuracy": accuracy, "before": size, "after": size, "history": history, "finished": True,
            "diverged": None, "ticket": None, "cpu_seconds": cpu}


def searched(levels, start=None):
    """A result of lottery_ticket: of each level parameters and accuracy."""
    rows, steps = [], start or 0
    for number, (parameters, accuracy) in enumerate(levels):
        steps += 8 * STEPS - (start or 0)
        rows.append({"level": number, "parameters": parameters, "macs": 25_216_256, "dense_bytes": DENSE_BYTES, "bytes": 4 * parameters,
                     "accuracy": accuracy, "steps": steps, "epochs": steps / STEPS, "processor_seconds": 60.0 * (number + 1),
                     "history": [{"epoch": 1, "test_accuracy": accuracy, "digest": "f00"}]})
    return {"options": {}, "accuracy": rows[-1]["accuracy"], "levels": rows, "start": start and {"steps": start}, "finished": True,
            "cpu_seconds": 300.0}


class Points(unittest.TestCase):
    def test_costs_of_a_run(self):
        point, = tickets_page.points_of("two-sided", trained(80.0, 500, 900, [1000, 1000, 400]))
        self.assertEqual(point, Point(500, 900, 80.0, 3, 240.0, STEPS * 2400))
        point, = tickets_page.points_of("early-bird-0.5", {**trained(80.0, 500, 900, [1000, 400]), "processor_seconds": 99.0})
        self.assertEqual(point.seconds, 99.0)

    def test_costs_of_levels(self):
        first, second = tickets_page.points_of("lottery", searched([(1000, 80.0), (800, 79.0)]))
        self.assertEqual(first, Point(1000, 25_216_256, 80.0, 8, 60.0, 8 * STEPS * 4000))
        self.assertEqual(second, Point(800, 25_216_256, 79.0, 16, 120.0, 8 * STEPS * 4000 + 8 * STEPS * 3200))
        rewound = tickets_page.points_of("lottery-epoch", searched([(1000, 80.0), (800, 79.0)], start=STEPS))
        self.assertEqual(rewound[0].bytes, STEPS * DENSE_BYTES + 7 * STEPS * 4000)
        self.assertEqual([point.epochs for point in rewound], [8, 15])

    def test_equal_size(self):
        def point(parameters, accuracy):
            return Point(parameters, 7, accuracy, 8, 1.0, 1.0)
        points = [point(300, 70.0), point(100, 50.0)]
        self.assertEqual(tickets_page.at_size(points, "parameters", 200), 60.0)
        self.assertEqual(tickets_page.at_size(points, "parameters", 300), 70.0)
        self.assertIsNone(tickets_page.at_size(points, "parameters", 400))
        self.assertEqual(tickets_page.at_size(points[:1], "parameters", 302), 70.0)
        self.assertIsNone(tickets_page.at_size(points, "macs", 8))

    def test_options_are_those_of_the_examples(self):
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*pp"))
        for row in ROWS.values():
            for word in [*tickets.NETWORK.split(), *row.options.split()]:
                if word.startswith("--"):
                    self.assertTrue(f'"{word}"' in text or f'"{word},' in text, f"{row.title}: {word}")
            self.assertTrue((ROOT / "examples" / f"{row.program}.cpp").is_file())


class Runs(Folder):
    script = "tickets"

    def words(self, *arguments, script=None):
        return [word for word in super().words(*arguments, script=script) if word not in ("--testbed", str(self.testbed))]

    def keep(self, key, result, seed=1):
        job = tickets.Job(key, seed)
        study_runs.write(self.results / "tickets" / job.file, {"machine": "a processor", "commit": "abc", "compiler": "a compiler",
                                                               **result, "command": job.shown()})

    def page(self):
        return (self.results / "tickets.md").read_text(encoding="utf-8")

    def test_interrupted_study_goes_on_from_a_checkpoint(self):
        self.check_interruption("dense-1", "--only", "dense")

    def test_nothing_has_run(self):
        self.assertIn("nothing has run: no page is written", self.run_script("--page", status=1))

    def test_other_programs_are_named(self):
        shown = self.run_script("--only", "lottery", status=1)
        self.assertIn("build/examples/lottery_ticket is not built", shown)

    def test_unfinished_results_do_not_count(self):
        self.keep("lottery", {**searched([(1000, 80.0)]), "finished": False})
        self.keep("early-bird-0.5", {**trained(80.0, 500, 900, [1000]), "finished": False, "diverged": "no finite loss"})
        shown = self.run_script("--list")
        self.assertIn("does not count: it is not finished", shown)
        self.assertIn("does not count: diverged: no finite loss", shown)

    def test_page(self):
        self.keep("dense", trained(88.0, 1_255_546, 25_216_256, 8 * [DENSE_BYTES]))
        self.keep("pufferfish", trained(86.0, PARAMETERS, MACS, 3 * [DENSE_BYTES] + 5 * [4 * PARAMETERS], cpu=200.0))
        self.keep("pufferfish", trained(87.0, PARAMETERS, MACS, 3 * [DENSE_BYTES] + 5 * [4 * PARAMETERS], cpu=220.0), seed=2)
        self.keep("lottery", searched([(1_255_546, 88.0), (1_005_242, 87.5), (505_000, 87.0)]))
        self.keep("early-bird-0.3", {**trained(85.0, 615_000, 12_000_000, 8 * [DENSE_BYTES]), "ticket": {"epoch": 5}})
        self.keep("early-bird-0.5", trained(81.0, 315_000, 6_000_000, 8 * [DENSE_BYTES]))
        self.run_script("--page", "--seeds", "2")
        text = self.page()
        sent = STEPS * (3 * DENSE_BYTES + 5 * 4 * PARAMETERS) / 1e9
        self.assertIn(f"| Pufferfish, plain factors | 510,074 | 18,400,512 | 86.50 (86.00 to 87.00) | 8 | 3.5 | {sent:.2f} |", text)
        self.assertIn("| Pufferfish, two-sided factors | not run |", text)
        self.assertIn("dense, seed 2; Pufferfish, two-sided factors, seed 2;", text)
        costs = text[text.index("## What it costs"):text.index("## At equal size")]
        self.assertIn("| lottery tickets, rewound to step 0 | 87.00 | 24 | 0.86 | ", costs)
        self.assertIn("| Early-Bird, q = 0.5 | 81.00 | 8 | 1.14 | ", costs)
        self.assertNotIn("q = 0.3 |", costs)
        accuracy = 81.0 + 4.0 * (PARAMETERS - 315_000) / 300_000
        self.assertIn(f"| Early-Bird | {accuracy:.2f} | - |", text)
        self.assertIn("Early-Bird, q = 0.3, seed 1: after epoch 5; Early-Bird, q = 0.5, seed 1: none, trained whole", text)
        self.assertIn("| 1 | 1,005,242 | 87.50 | 16 | 2.0 | 4,020,968 |", text)


if __name__ == "__main__":
    unittest.main()
