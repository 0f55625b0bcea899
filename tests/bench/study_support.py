# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stand-ins for the programs of bench/compressors, bench/pactrain, bench/reproduce, bench/tickets and bench/exchange_curves. All numbers are invented."""
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

# A training program: notes its start, fails or diverges where a file says so, waits for a signal where another one says so,
# and writes a result of as many epochs as it is asked for.
TRAIN = """#!{python}
import json, pathlib, signal, sys, time
def of(option):
    return sys.argv[sys.argv.index(option) + 1]
here = pathlib.Path(__file__).resolve().parent
checkpoint, out = pathlib.Path(of("--checkpoint")), pathlib.Path(of("--json"))
def result(count, diverged=None):
    hybrid = of("--mode") == "hybrid"
    history = [{{"epoch": e + 1, "low_rank": hybrid and e > 0, "test_accuracy": 50.0 + 10 * e, "ms_per_step": 100.0,
                "exchange_ms": 40.0, "bytes_per_step": 2805864}} for e in range(count)]
    rare = {{"local_steps": 80, "outer_steps": 10, "payload_bytes_a_step": 350000.0, "exposed_ms": 3.0}}
    pruning = {{"options": "ratio " + of("--prune-ratio") + " by GraSP, at epoch 0"}} if "--prune-ratio" in sys.argv else None
    document = {{"options": {{"epochs": int(of("--epochs")), "batch": 128}}, "accuracy": None if diverged else 80.0,
                "before": {{"parameters": 701466, "macs": 9, "bytes_per_step": 2805864}},
                "after": {{"parameters": 9, "macs": 9, "bytes_per_step": 952424 if hybrid else 2805864}},
                "exchange": {{"payload_bytes": 952424 if hybrid else 2805864, "pruning": pruning,
                             "rare": rare if "--local-steps" in sys.argv else None}},
                "history": history, "finished": count == int(of("--epochs")), "diverged": diverged}}
    return dict(document, switch={{"milliseconds": 500.0}}) if hybrid else document
def stop(*_):
    checkpoint.write_text("a state")
    out.write_text(json.dumps(result(1)))
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
with open(here / "started", "a") as log:
    log.write(out.stem + (" resumed" if checkpoint.is_file() else " fresh") + "\\n")
if (here / ("fail-" + out.stem)).is_file():
    sys.exit("no luck")
if (here / ("diverge-" + out.stem)).is_file():
    out.write_text(json.dumps(result(1, "no finite loss in 10 steps")))
    sys.exit(1)
while (here / "wait").is_file() and not checkpoint.is_file():
    time.sleep(0.01)
out.write_text(json.dumps(result(int(of("--epochs")))))
"""

# bench_compressors: encoding takes a millisecond, decoding one for each rank.
CODECS = """#!{python}
import json, pathlib, sys
def of(option):
    return sys.argv[sys.argv.index(option) + 1]
out = pathlib.Path(of("--json"))
with open(pathlib.Path(__file__).resolve().parent / "started", "a") as log:
    log.write(out.stem + "\\n")
ranks = sys.argv[sys.argv.index("--ranks") + 1:sys.argv.index("--threads")]
lines = [json.dumps({{"kind": "machine"}})] + [json.dumps({{"kind": "codec", "mode": mode, "ranks": int(p), "encode_ms": 1.0,
         "decode_ms": float(p)}}) for mode in ("dense", "hybrid") for p in ranks]
out.write_text("\\n".join(lines) + "\\n")
"""

MPIRUN = '#!/bin/sh\n# -np 2 --bind-to none --mca NAME VALUE PROGRAM ...\nshift 7\nexec "$@"\n'
TESTBED = '#!/bin/sh\nwhile [ "$1" != --run ]; do shift; done\nshift\nexec "$@"\n'


class Folder(unittest.TestCase):
    script = None  # of bench

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.results, self.work, self.build = (self.folder / name for name in ("results", "work", "build"))
        self.train = self.program("build/examples/train_image_classifier", TRAIN.format(python=sys.executable))
        self.codecs = self.program("build/bench/bench_compressors", CODECS.format(python=sys.executable))
        self.program("bin/mpirun", MPIRUN)
        self.testbed = self.program("testbed", TESTBED)

    def assertIn(self, member, container, msg=None):  # a page is too long for a message
        near = [line for line in container.splitlines() if line[:12] == member[:12]] if isinstance(container, str) else container
        self.assertTrue(member in container, msg or f"{member}\nnot in\n{near or container[:2000]}")

    def program(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def words(self, *arguments, script=None):
        more = [] if self.script == "compressors" else ["--testbed", str(self.testbed)]
        return ["env", f"PATH={self.folder}/bin:/usr/bin:/bin", sys.executable, str(ROOT / "bench" / (script or self.script)), "--build",
                str(self.build), "--work", str(self.work), "--results", str(self.results), "--data", str(self.folder), *more, *arguments]

    def run_script(self, *arguments, status=0, script=None):
        done = subprocess.run(self.words(*arguments, script=script), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False, timeout=120)
        self.assertEqual(done.returncode, status, done.stdout)
        self.assertNotIn("Traceback", done.stdout)
        return done.stdout

    def started(self, of=None):
        log = (of or self.train).parent / "started"
        return sorted(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else []

    def interrupt(self, number, *arguments):
        """Starts the script, sends a signal when its first run has started, and returns its exit status."""
        process = subprocess.Popen(self.words(*arguments), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while not self.started() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(number)
        process.communicate(timeout=60)
        return process.returncode

    def check_interruption(self, run, *arguments):
        """SIGINT and SIGTERM stop a run at its checkpoint, and it goes on from there."""
        (self.train.parent / "wait").touch()
        self.assertEqual(self.interrupt(signal.SIGINT, *arguments), 130)
        self.assertEqual(self.started(), [f"{run} fresh"])
        self.assertTrue((self.work / f"{run}.ckpt").is_file())
        (self.train.parent / "wait").unlink()
        shown = self.run_script(*arguments)
        self.assertIn("hours are left", shown)
        self.assertEqual(self.started()[:2], [f"{run} fresh", f"{run} resumed"])
        self.assertEqual(list(self.work.glob("*.ckpt")), [])

    def row(self, text, start, title):
        part = text[text.index(start):]
        return next(line for line in part.splitlines() if line.startswith(f"| {title} |"))
