#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""testbed.py PROGRAM MPIRUN: bench_exchange's records from two ranks, and that bench/testbed removes all it has made.

What needs network namespaces is left out where there are none (not root, no iproute2).
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTBED = ROOT / "bench" / "testbed"
PROGRAM, MPIRUN = None, None


def run(*words, **more):
    return subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
                          timeout=240, **more)


class Exchange(unittest.TestCase):
    def exchange(self, *words, ranks=2):
        env = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
        return run(MPIRUN, "-n", ranks, PROGRAM, "--json", "-", "--default-plan", "--seconds", "0.5", "--runs", "2", *words, env=env)

    def records(self, *words):
        done = self.exchange(*words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def test_all_reduces(self):
        rows = self.records("--only", "allreduce", "--sizes", "4096", "1000000", "--goodput-mbit", "1000", "--skew-ms", "1")
        plan, *rows = rows
        self.assertEqual((plan["kind"], plan["ranks"]), ("plan", 2))
        self.assertEqual([(r["bytes"], r["algorithm"]) for r in rows],
                         [(size, a) for size in (4096, 1000000) for a in ("library", "ring", "recursive doubling")])
        for row in rows:
            self.assertEqual((row["kind"], row["ranks"], row["runs"]), ("allreduce", 2, 2))
            self.assertLessEqual(row["ms_min"], row["ms"])
            self.assertLessEqual(row["ms"], row["ms_p90"])
        for size in (4096, 1000000):
            self.assertEqual(sum(r["selected"] for r in rows if r["bytes"] == size), 1)

    def test_percentages(self):
        row = self.records("--only", "allreduce", "--sizes", "1000000", "--goodput-mbit", "1000")[1]
        # 2 (p - 1) / p of 8 million bits at 1000 Mbit/s are 8 ms.
        self.assertAlmostEqual(row["link_percent"], 100 * 8 / row["ms"], delta=0.01 * row["link_percent"])
        row = self.records("--only", "allreduce", "--sizes", "4096")[1]
        self.assertIsNone(row["link_percent"])

    def test_steps(self):
        payloads = {"none": 13_344_552, "bf16": 6_672_276, "fp16": 6_672_276, "powersgd-r4": 648_824, "signum": 417_020,
                    "topk --compress-ratio 0.01": 266_696, "signum --compress-route two-hop": 834_044, "doublesqueeze": 625_900}
        rows = self.records("--only", "buckets", "step", "--modes", "hybrid", "--batch", "1", "--compressors", *payloads)
        _, buckets, *steps = rows
        self.assertEqual((buckets["kind"], buckets["mode"], buckets["batch"]), ("buckets", "hybrid", 1))
        self.assertEqual(sum(b["bytes"] for b in buckets["buckets"]), payloads["none"])
        ready = [b["ready_ms"] for b in buckets["buckets"]]
        self.assertEqual(ready, sorted(ready))
        self.assertGreater(ready[0], 0)
        self.assertEqual({r["compressor"]: r["payload_bytes"] for r in steps}, payloads)
        for row in steps:
            self.assertEqual((row["kind"], row["system"], row["mode"], row["ranks"]), ("step", "ours", "hybrid", 2))
            parts = sum(row[name + "_ms"] for name in ("compute", "encode", "exposed", "decode", "update"))
            self.assertAlmostEqual(parts, row["ms_per_step"], delta=0.01)

    def test_refusals(self):
        for words, told in [(["--compressors", "zip"], "no compressor is called zip"), (["--ranks", "3"], "3 ranks were asked for"),
                            (["--compressors", "powersgd-rx"], "no compressor is called powersgd-rx"),
                            (["--compressors", "topk --compress-bits 2"], "--compress-bits 2 means nothing for --compress topk")]:
            done = self.exchange("--only", "step", "--modes", "hybrid", "--batch", "1", *words)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(told, done.stderr)


class Words(unittest.TestCase):
    def test_refusals(self):
        for words, told in [([], "--json FILE"), (["--json", "x", "--rate", "1mbps"], "no rate: 1mbps"),
                            (["--json", "x", "--rate", "0gbit"], "no rate: 0gbit"),
                            (["--json", "x", "--hosts", "1"], "--hosts"), (["--json", "x", "--delay", "5"], "no time: 5"),
                            (["--json", "x", "--only", "all"], "--only"),
                            (["--json", "x", "--compressors", "rare"], "rare is not measured in single steps")]:
            done = run(TESTBED, *words)
            self.assertEqual(done.returncode, 2, words)
            self.assertIn(told, done.stderr)


def namespaces():
    return [line.split()[0] for line in run("ip", "netns", "list").stdout.splitlines()]


def why_no_namespaces():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return "no root or no iproute2"
    name = f"pufferfish-trial-{os.getpid()}"
    if run("ip", "netns", "add", name).returncode != 0:
        return "no network namespaces here"
    run("ip", "netns", "delete", name)
    return None


class Hosts(unittest.TestCase):
    """Names tell whose namespaces they are: others may be at work."""

    @classmethod
    def setUpClass(cls):
        if why := why_no_namespaces():
            raise unittest.SkipTest(why)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="pufferfish-testbed-test-")
        self.addCleanup(folder.cleanup)
        self.json = pathlib.Path(folder.name) / "link.json"

    def words(self, *more):
        return [str(TESTBED), "--only", "link", "--no-build", "--link-seconds", "0.4", "--json", str(self.json), *more]

    def start(self, *more):
        process = subprocess.Popen(self.words(*more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def left_by(self, process):
        return [n for n in namespaces() if n.startswith(f"pufferfish-testbed-{process.pid}-")]

    def test_link(self):
        for hosts in ["2", "3"]:
            process = self.start("--hosts", hosts, "--rate", "100mbit")
            told = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, told)
            self.assertEqual(self.left_by(process), [])
            header, link = map(json.loads, self.json.read_text(encoding="utf-8").splitlines())
            self.assertEqual((header["kind"], link["kind"], link["rate_mbit"]), ("testbed", "link", 100))
            self.assertTrue(50 < link["raw_goodput_mbit"] < 120, link)
            self.assertFalse(self.json.with_name(self.json.name + ".part").exists())

    def test_any_program(self):
        for program, status, told in [("hostname; test $OMPI_COMM_WORLD_SIZE = 2", 0, 2), ("exit 3", 3, 0)]:
            process = self.start("--hosts", "2", "--rate", "100mbit", "--run", "sh", "-c", program)
            output, errors = process.communicate(timeout=60)
            self.assertEqual(process.returncode, status, output + errors)
            self.assertEqual(len(output.splitlines()) if status == 0 else 0, told, output)
            self.assertEqual(self.left_by(process), [])

    def test_a_program_is_ended(self):
        process = self.start("--hosts", "2", "--seconds", "3", "--run", "sleep", "100")
        told = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, told)
        self.assertIn("the time of --seconds is over", told[1])
        self.assertEqual(self.left_by(process), [])

    def test_interrupted(self):
        for number in [signal.SIGINT, signal.SIGTERM]:
            process = self.start("--hosts", "3", "--link-seconds", "30")
            end = time.monotonic() + 30
            while len(self.left_by(process)) < 4 and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.5)
            os.killpg(process.pid, number)
            told = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 130, told)
            self.assertEqual(self.left_by(process), [])
            self.assertFalse(self.json.exists())

    def test_a_failure_leaves_nothing(self):
        process = self.start("--hosts", "2", "--burst", "nonsense")
        told = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 1, told)
        self.assertIn("tbf", told[1])
        self.assertEqual(self.left_by(process), [])

    def test_killed_and_cleaned(self):
        process = self.start("--hosts", "2", "--link-seconds", "30")
        end = time.monotonic() + 30
        while len(self.left_by(process)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        self.assertEqual(len(self.left_by(process)), 2)
        self.assertEqual(run(TESTBED, "--clean").returncode, 0)
        self.assertEqual(self.left_by(process), [])

    def test_delay(self):
        process = self.start("--hosts", "2", "--rate", "100mbit", "--delay", "5ms")
        told = process.communicate(timeout=60)
        self.assertEqual(self.left_by(process), [])
        if process.returncode == 0:
            link = json.loads(self.json.read_text(encoding="utf-8").splitlines()[1])
            self.assertGreater(link["round_trip_ms"], 9)
            self.assertIn(link["delay_by"], ("netem", "relay"))
        else:
            self.assertIn("the relay needs a TUN device", told[1])

    def test_delay_by_netem(self):
        """Never by the relay: this option is for runs that are to be like earlier ones."""
        process = self.start("--hosts", "2", "--rate", "100mbit", "--delay", "5ms", "--delay-by", "netem")
        told = process.communicate(timeout=60)
        self.assertEqual(self.left_by(process), [])
        if process.returncode == 0:
            link = json.loads(self.json.read_text(encoding="utf-8").splitlines()[1])
            self.assertEqual(link["delay_by"], "netem")
            self.assertGreater(link["round_trip_ms"], 9)
        else:
            self.assertIn("this kernel has no netem", told[1])


if __name__ == "__main__":
    PROGRAM, MPIRUN = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
