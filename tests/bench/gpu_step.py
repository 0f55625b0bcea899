#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""gpu_step.py DEVICE-PROGRAM EMULATED-PROGRAM: bench/gpu_step with a few channels of each network, ours on the emulated
device and PyTorch, where there is one, on the processor: do both sides build the same networks, and do all numbers come?
The device's program says that there is no device, or answers."""
import importlib.machinery
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE, EMULATED = sys.argv[1:3]
NETWORKS = ["resnet18", "vgg19", "resnet50", "lstm", "transformer"]


def python_with_torch():
    for python in [sys.executable, "/usr/bin/python3"]:
        try:
            found = subprocess.run([python, "-c", "import torch"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   check=False)
        except OSError:
            continue
        if found.returncode == 0:
            return python
    return ""


class Steps(unittest.TestCase):
    def run_script(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "steps.json"
            done = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu_step"), "--ours", EMULATED, "--tiny", "--device",
                                   "cpu", "--rounds", "1", "--steps", "1", "--minutes", "0", "--json", str(file), *arguments], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            self.assertEqual(done.returncode, 0, done.stdout)
            return json.loads(file.read_text(encoding="utf-8")), done.stdout

    def test_all_networks(self):
        python = python_with_torch()
        result, shown = self.run_script("--networks", *(f"{n}:2" for n in NETWORKS), "--precision", "fp32", "--python", python,
                                        "--variants", "eager", "--each-layer")
        self.assertEqual([(r["network"], r["mode"]) for r in result["rows"]],
                         [(n, m) for n in NETWORKS for m in ("dense", "hybrid")])
        for row in result["rows"]:
            self.assertGreater(row["ms"]["ours"]["median"], 0)
            self.assertGreater(row["gflop"], 0)
            self.assertTrue(row["layers"])
            self.assertTrue(row["captured"])
            images = row["network"] not in ("lstm", "transformer")
            self.assertEqual("ours, cuDNN" in row["ms"], images and result["machine"]["cudnn"] > 0)
            if python:  # the script has compared the numbers of parameters
                self.assertEqual(row["best_peer"], "PyTorch eager")
        self.assertTrue(all(small["parameters"] < large["parameters"]
                            for large, small in zip(result["rows"][::2], result["rows"][1::2])))
        self.assertIn("LowRankConv", shown)
        self.assertEqual(set(result["rates"]["tflops"]), {"fp32", "tf32", "bf16", "fp16"})

    def test_precisions(self):
        for precision, networks in [("tf32", ["resnet18:2"]), ("bf16", ["resnet18:2", "lstm:2", "transformer:2"])]:
            result, _ = self.run_script("--networks", *networks, "--precision", precision, "--modes", "hybrid", "--python", "",
                                        "--no-layers")
            self.assertEqual([row["precision"] for row in result["rows"]], [precision] * len(networks))

    def test_directly(self):
        result, _ = self.run_script("--networks", "resnet18:2", "--modes", "hybrid", "--python", "", "--no-layers", "--direct",
                                    "--two-streams")
        for name in ("ours, direct", "ours, two streams"):
            self.assertIn(name, result["rows"][0]["ms"])
        self.assertEqual(result["rows"][0]["precision"], "bf16")

    def test_convolutions(self):
        asked = {"work": "convolutions", "batch": 2, "tiny": True}
        done = subprocess.run([EMULATED], input=json.dumps(asked) + "\n", text=True, stdout=subprocess.PIPE, check=True)
        rows = json.loads(done.stdout)["convolutions"]
        self.assertEqual(len(rows), 15)
        for row in rows:
            self.assertGreater(row["gathered_us"], 0)
            self.assertGreater(row["groups_us"], 0)
            self.assertLess(row["difference"], 1e-3)

    def test_attention(self):
        for dropout in (0.0, 0.1):
            asked = {"work": "attention", "tiny": True, "dropout": dropout}
            done = subprocess.run([EMULATED], input=json.dumps(asked) + "\n", text=True, stdout=subprocess.PIPE, check=True)
            rows = json.loads(done.stdout)["attention"]
            self.assertEqual([row["tokens"] for row in rows], [24] * 6 + [130] * 6)
            for row in rows:
                self.assertGreater(row["floats_us"], 0)
                self.assertGreater(row["tensor_us"], 0)
                # Rounding of weights and of gradients of scores, and of both results.
                self.assertGreater(row["difference"], 0)
                self.assertLess(row["difference"], 8e-3)

    def test_launches_of_a_step(self):
        # Kernels, copies and fills of a captured step of the published network. With 128 images, nine batch norms have
        # more rows than one launch normalizes; the convolutions before all of them compute their moments, those after
        # five of them the norms themselves, and those after six of them the sums for their gradients. The program ends
        # before it would run them.
        for batch, most, applied, sums in [(2, 148, 0, 0), (128, 147, 4, 3)]:
            asked = {"work": "step", "network": "resnet18", "mode": "hybrid", "batch": batch, "precision": "bf16", "steps": 1}
            done = subprocess.run([EMULATED], input=json.dumps(asked) + "\n", text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, check=True, env={**os.environ, "PUFFERFISH_EMULATED_GRAPHS": "only"})
            count, what = done.stderr.strip().split("\n")[-1].split()
            self.assertEqual(what, "operations")
            self.assertLessEqual(int(count), most, done.stderr)
            self.assertGreater(int(count), most - 10, "a lower limit is possible")
            self.assertNotIn("norm_use_batch", done.stderr)
            launches = [line.split() for line in done.stderr.splitlines()]
            for name, times in [("norm_apply", applied), ("norm_gradient_sums", sums)]:
                self.assertEqual([int(words[0]) for words in launches if words[1:] == [name]], [times] if times else [], name)

    def test_launches_of_a_transformer_step(self):
        # Two layers in each stack, of which one is factorized. The projections of queries, keys and values are one
        # product, and so are the gradients of their weights and, before they are added, those of their input.
        for mode, products, operations in [("dense", 71, 137), ("hybrid", 104, 170)]:
            asked = {"work": "step", "network": "transformer", "mode": mode, "batch": 32, "precision": "bf16", "steps": 1, "tiny": True}
            done = subprocess.run([EMULATED], input=json.dumps(asked) + "\n", text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, check=True, env={**os.environ, "PUFFERFISH_EMULATED_GRAPHS": "only"})
            launches = {name.split("<")[0]: int(count) for count, name in (line.split(maxsplit=1) for line in done.stderr.strip().split("\n"))}
            self.assertEqual(launches["product"], products, done.stderr)
            self.assertEqual(launches["add_terms"], 4, done.stderr)
            self.assertEqual(launches["operations"], operations, done.stderr)

    def test_no_time_left(self):
        done = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu_step"), "--ours", EMULATED, "--tiny", "--python", "",
                               "--minutes", "0.001"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual(done.stdout.count(": no time left"), 10)

    def test_an_answer_that_takes_too_long(self):
        script = importlib.machinery.SourceFileLoader("gpu_step", str(ROOT / "bench" / "gpu_step")).load_module()
        server = script.Server(["sh", "-c", "read line; case $line in *slow*) sleep 60;; *) echo '{\"ms\": 1}';; esac"])
        with self.assertRaisesRegex(script.Missing, "not done after"):
            server.ask(seconds=0.3, work="slow")
        self.assertEqual(server.ask(seconds=30, work="step"), {"ms": 1})  # by another process
        server.close()

    def test_without_a_device(self):
        done = subprocess.run([DEVICE], input="", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        self.assertIn(done.returncode, (0, 77))
        if done.returncode == 77:
            self.assertIn("no CUDA device", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
