#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""gpu_switch.py EMULATED PROGRAM: bench_gpu_switch's records from an emulated device, and what it says without a device."""
import json
import subprocess
import sys
import unittest

EMULATED, PROGRAM = None, None


def run(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, timeout=200)


class Switch(unittest.TestCase):
    def test_records(self):
        done = run(EMULATED, "--models", "resnet18", "lstm", "--shrink", "32", "--runs", "2", "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        machine, *rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual((machine["kind"], machine["device"]), ("machine", "emulated device"))
        self.assertEqual({r["model"] for r in rows}, {"resnet18", "lstm"})
        of_host = {r["model"]: r for r in rows if r["where"] == "cpu"}
        for row in rows:
            host = of_host[row["model"]]
            self.assertEqual(row["runs"], 2)
            self.assertLessEqual(row["ms_min"], row["ms"])
            self.assertLessEqual(row["ms"], row["ms_max"])
            for same in ("layers", "matrices", "parameters_before", "parameters_after", "weight_bytes"):
                self.assertEqual(row[same], host[same])
            self.assertLess(row["error_difference"], 1e-6)
            self.assertAlmostEqual(row["relative_error"], host["relative_error"], delta=1e-6)
            if row is host:
                self.assertEqual((row["bytes_to_host"], row["bytes_to_device"]), (0, 0))
        for model, layers, matrices in (("resnet18", 14, 14), ("lstm", 2, 16)):
            mine = [r for r in rows if r["model"] == model]
            self.assertEqual([r["solver"] for r in mine][1:3], ["host", "cusolver"])
            self.assertEqual((mine[0]["layers"], mine[0]["matrices"]), (layers, matrices))
        # Copied for each of 16 matrices 46 x 46: singular values, two moments and cuSOLVER's status; their order. Without
        # a solver, at least the weights.
        of_lstm = {r["solver"]: r for r in rows if r["model"] == "lstm"}
        self.assertEqual(of_lstm["cusolver"]["bytes_to_host"], 16 * (46 * 8 + 16 + 4))
        self.assertEqual(of_lstm["cusolver"]["bytes_to_device"], 16 * 46 * 4)
        self.assertGreaterEqual(of_lstm["host"]["bytes_to_host"], of_lstm["host"]["weight_bytes"])

    def test_no_device(self):
        done = run(PROGRAM, "--models", "resnet18", "--shrink", "64", "--runs", "1")
        if done.returncode != 0:
            self.assertEqual(done.returncode, 77, done.stderr)
            self.assertIn("no CUDA device", done.stderr)


if __name__ == "__main__":
    EMULATED, PROGRAM = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
