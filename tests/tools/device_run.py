#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""device_run.py [BUILD [PROGRAM]]: scripts/device_run and what it rests on, without a device: steps and their time-outs,
tests/gpu/sanitize with a stand-in for compute-sanitizer, NVIDIA's libraries among Python's packages, carried headers. With
a BUILD, instead: whether all that the script names is there, and what A, B, C and S say without a device (PROGRAM,
gpu_device)."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
PROGRAM = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import device_steps  # noqa: E402
import nvidia_library  # noqa: E402
import surroundings  # noqa: E402


def run(*words, **environment):
    return subprocess.run([str(w) for w in words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                          timeout=100, env={**os.environ, **environment})


def script(folder, name, text):
    file = pathlib.Path(folder) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    file.chmod(0o755)
    return file


class Folder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)


class Steps(Folder):
    def test_results_come_as_they_are_there(self):
        record = device_steps.Record(self.folder, "X")
        step = device_steps.Step
        start = time.monotonic()
        done = device_steps.run_steps(record, [
            step("slow", ["sh", "-c", "echo before; sleep 60 & sleep 60"], 1),
            step("right", ["cat"], 20, stdin="7", facts=lambda text: {"cases": int(text)}),
            step("odd", ["echo", "x"], 20, facts=lambda text: {"cases": int(text)}),
            step("wrong", ["sh", "-c", "echo it is; exit 3"], 20),
            step("silent", ["true"], 20, expect="SUMMARY"),
            step("none here", ["/no/such/program"], 20),
            step("no device", ["sh", "-c", "exit 77"], 20),
        ], jobs=4)
        self.assertLess(time.monotonic() - start, 15)  # the one that hangs has ended, with its children
        self.assertEqual([r["status"] for r in done], ["late", "passed", "failed", "failed", "failed", "missing", "skipped"])
        self.assertEqual(done[1]["facts"], {"cases": 7})
        kept = json.loads((self.folder / "X.json").read_text(encoding="utf-8"))
        self.assertEqual(sorted(s["name"] for s in kept["steps"]), sorted(r["name"] for r in done))
        log = (self.folder / "X.log").read_text(encoding="utf-8")
        self.assertIn("before", log)
        self.assertIn("it is", log)

    def test_a_signal_ends_the_steps_too(self):
        code = ("import device_steps as d, sys; r = d.Record(sys.argv[1], 'X');"
                "d.run_steps(r, [d.Step('long', ['sh', '-c', 'echo $$ > ' + sys.argv[1] + '/pid; sleep 60'], 60)])")
        process = subprocess.Popen([sys.executable, "-c", code, str(self.folder)], env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")})
        file = self.folder / "pid"
        while not (file.is_file() and file.read_text(encoding="utf-8").strip()):
            time.sleep(0.02)
        process.terminate()
        self.assertEqual(process.wait(), 143)
        child = int(file.read_text(encoding="utf-8"))
        for _ in range(500):
            state = pathlib.Path(f"/proc/{child}/stat")
            if not state.exists() or ") Z " in state.read_text(encoding="utf-8"):
                return
            time.sleep(0.02)
        self.fail("the step goes on")

    def test_no_step_starts_after_the_deadline(self):
        record = device_steps.Record(self.folder, "X")
        done = device_steps.run_steps(record, [device_steps.Step("late", ["true"], 20)], deadline=time.monotonic() + 1)
        self.assertEqual(done[0]["status"], "no time")

    def test_long_output_keeps_both_ends(self):
        record = device_steps.Record(self.folder, "X")
        device_steps.run_steps(record, [device_steps.Step("long", ["sh", "-c", "echo first; seq 1 200000; echo last"], 20)])
        log = (self.folder / "X.log").read_text(encoding="utf-8")
        self.assertLess(len(log), 2 * device_steps.KEPT)
        self.assertIn("first", log)
        self.assertIn("last", log)


class Sanitize(Folder):
    # The stand-in finds something in one file, cannot end with another, and says what compute-sanitizer does.
    TOOL = """
tool=$2
shift 6
"$@" > /dev/null
case "$*" in
*"/conv.cpp"*) [ "$tool" = memcheck ] && echo "========= Invalid __global__ read" && echo "========= ERROR SUMMARY: 1 error" && exit 86 ;;
*"/lstm.cpp"*) sleep 60 ;;
esac
echo "========= RACECHECK SUMMARY: 0 hazards"; echo "========= ERROR SUMMARY: 0 errors"
"""

    def sanitize(self, *words, program="case $* in *source-file=none*) exit 0;; *red-zones*) exit 0;; *) exit 5;; esac"):
        tool = script(self.folder, "tool", self.TOOL)
        return run(sys.executable, ROOT / "tests" / "gpu" / "sanitize", script(self.folder, "program", program), *words, SANITIZER=str(tool))

    def test_totals_are_of_what_ran(self):
        done = self.sanitize("memcheck", "racecheck", "--files", "conv", "lstm", "products", "--seconds", "2", "--jobs", "4",
                             "--log", self.folder)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual(done.stdout.splitlines()[-1], "3 passed, 1 failed, 2 not done")
        self.assertIn("Invalid __global__ read", done.stdout)
        self.assertIn("lstm: late", done.stdout)
        self.assertTrue((self.folder / "sanitize.json").is_file())

    def test_nothing_failed(self):
        done = self.sanitize("racecheck", "--files", "conv", "products", "--total", "60")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, "2 passed, 0 failed, 0 not done"))

    def test_all_files_of_tests(self):
        done = self.sanitize("synccheck", "--total", "3")  # time for none
        self.assertEqual(done.stdout.count("no time"), len(list((ROOT / "tests" / "gpu").glob("*.cpp"))) - 2, done.stdout)

    def test_no_device(self):
        done = self.sanitize("memcheck", program="echo no CUDA device: nothing was run; exit 77")
        self.assertEqual(done.returncode, 77)
        self.assertIn("no CUDA device", done.stdout)


class Libraries(Folder):
    def found(self, name):
        done = run(sys.executable, ROOT / "scripts" / "nvidia_library.py", name, self.folder / "cuda", PYTHONPATH=str(self.folder / "site"))
        return done.stdout.strip().split(";")

    def package(self, *files):
        for file in files:
            place = self.folder / "site" / "nvidia" / "libtest" / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("", encoding="utf-8")
        return self.folder / "site" / "nvidia" / "libtest"

    def test_a_package_without_the_linkers_name(self):
        place = self.package("lib/libpuffer.so.9", "lib/libpuffer.so.10", "lib/libpuffer_ops.so.11", "include/puffer.h")
        self.assertEqual(self.found("puffer"), [str(place / "lib" / "libpuffer.so.10"), str(place / "include")])

    def test_the_toolkit_comes_first(self):
        self.package("lib/libpuffer.so.9", "include/puffer.h")
        for file in ("lib64/libpuffer.so", "include/puffer.h"):
            place = self.folder / "cuda" / file
            place.parent.mkdir(parents=True)
            place.write_text("", encoding="utf-8")
        self.assertEqual(self.found("puffer")[0], str(self.folder / "cuda" / "lib64" / "libpuffer.so"))

    def test_what_is_absent_is_said(self):
        self.assertIn("no libpuffer.so in", self.found("puffer")[1])
        self.package("lib/libpuffer.so.9")
        self.assertIn("but no puffer.h", self.found("puffer")[1])

    def test_packages_are_found(self):
        self.package("lib/libpuffer.so.9")
        sys.path.insert(0, str(self.folder / "site"))
        self.addCleanup(sys.path.remove, str(self.folder / "site"))
        self.assertIn(self.folder / "site" / "nvidia" / "libtest", nvidia_library.package_folders())


class Carried(Folder):
    """A machine may have Meson and lack headers."""

    def setUp(self):
        super().setUp()
        header = self.folder / ".carry" / "include" / "carried_header.hpp"
        header.parent.mkdir(parents=True)
        header.write_text("int carried();\n", encoding="utf-8")
        for name in ("meson", "ninja"):
            script(self.folder, f"bin/{name}", "exit 0\n")
            script(self.folder, f".carry/bin/{name}", "exit 1\n")
        self.path = f"{self.folder}/bin:{os.environ['PATH']}"

    def test_scripts(self):
        done = run("bash", "-c", f"source {ROOT}/scripts/debian.sh; cd {self.folder}; use_carried && have_header carried_header.hpp"
                   " && meson", PATH=self.path)
        self.assertEqual(done.returncode, 0, done.stdout)
        done = run("bash", "-c", f"source {ROOT}/scripts/debian.sh; cd {self.folder}/bin; use_carried", PATH=self.path)
        self.assertEqual(done.returncode, 1, done.stdout)  # nothing carried: packages are asked for

    def test_measurements(self):
        code = ("import surroundings, pathlib, os, shutil; print(surroundings.use_carried(pathlib.Path(os.environ['CARRY'])));"
                "print(os.environ['CPLUS_INCLUDE_PATH']); print(shutil.which('meson'))")
        done = run(sys.executable, "-c", code, CARRY=str(self.folder / ".carry"), PATH=self.path, PYTHONPATH=str(ROOT / "bench"))
        said = done.stdout.splitlines()
        self.assertEqual((said[0], said[2]), ("True", str(self.folder / "bin" / "meson")), done.stdout)
        self.assertIn(str(self.folder / ".carry" / "include"), said[1])
        self.assertFalse(surroundings.use_carried(self.folder / "bin"))


class Script(Folder):
    def test_shell_syntax(self):
        for name in ("scripts/carry", "scripts/debian.sh", "tests/run"):
            done = run("bash", "-n", ROOT / name)
            self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_no_package(self):
        done = run(sys.executable, ROOT / "scripts" / "device_run", "A", "--folder", self.folder / "none", "--out", self.folder)
        self.assertEqual(done.returncode, 2)
        self.assertIn("device_run prepare", done.stdout)

    def test_a_command_finds_the_programs(self):
        script(self.folder, "package/bin/train_translator", 'echo "trains $1"\n')
        (self.folder / "package" / "about.json").write_text("{}", encoding="utf-8")
        done = run(sys.executable, ROOT / "scripts" / "device_run", "--folder", self.folder / "package", "run", "sh", "-c",
                   '"$BUILD"/examples/train_translator --json; exit 3')
        self.assertEqual((done.returncode, done.stdout), (3, "trains --json\n"))
        done = run(sys.executable, ROOT / "scripts" / "device_run", "--folder", self.folder / "package", "run")
        self.assertEqual((done.returncode, done.stdout), (2, "device_run run COMMAND...: a command is missing\n"))
        done = run(sys.executable, ROOT / "scripts" / "device_run", "A", "--folder", self.folder / "none", "--out", "run", "--minutes", "x")
        self.assertIn("argument --minutes", done.stdout)  # which is not part of a command

    def test_what_the_steps_name_exists(self):
        done = run(sys.executable, ROOT / "scripts" / "device_run", "check", BUILD)
        self.assertEqual(done.returncode, 0, done.stdout)

    @unittest.skipUnless(PROGRAM and PROGRAM.exists(), "gpu_device is not built")
    def test_no_device(self):
        if run(PROGRAM, "--source-file=none").returncode != 77:
            self.skipTest("there is a device")
        package = self.folder / "package"
        (package / "bin").mkdir(parents=True)
        shutil.copy(PROGRAM, package / "bin" / "gpu_device")
        # Stand-ins for what else the package has: they say what programs say without a device.
        for name in ("gpu_cudnn_device", "bench_gpu_step", "bench_gpu_switch"):
            script(package, f"bin/{name}", "echo no CUDA device; exit 77\n")
        for name in ("gpu_library_host", "train_image_classifier"):
            script(package, f"bin/{name}", "exit 0\n")
        script(package, "openmpi/bin/mpirun", "exit 77\n")
        packed = self.folder / "packed"
        packed.mkdir()
        with tarfile.open(packed / "programs.tar.xz", "w:xz", preset=0) as archive:
            for part in package.iterdir():
                archive.add(part, part.name)
        for place in (package, packed):
            (place / "about.json").write_text('{"images": 0}', encoding="utf-8")
        for part in "ABCS":
            start = time.monotonic()
            place = packed if part == "A" else package
            done = run(sys.executable, ROOT / "scripts" / "device_run", part, "--folder", place, OUT=str(self.folder / "out"))
            self.assertEqual(done.returncode, 77, done.stdout)
            self.assertIn("no device: nothing was run", done.stdout.splitlines()[-1])
            self.assertLess(time.monotonic() - start, 30)
            result = json.loads((self.folder / "out" / f"{part}.json").read_text(encoding="utf-8"))
            self.assertIsNone(result["device"])
            self.assertEqual(len([s for s in result["steps"] if s["status"] == "skipped"]), 5, result)
        self.assertLessEqual(len(list((self.folder / "out").iterdir())), 8)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], defaultTest=["Script"] if BUILD else ["Steps", "Sanitize", "Libraries", "Carried"])
