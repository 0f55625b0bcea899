# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What scripts that measure share: an environment without accidental tuning, the build, what to say of the machine."""
import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What keeps PyTorch's memory between steps and lets ATen use AVX-512, which it leaves alone otherwise.
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"):
    TUNED["ATEN_CPU_CAPABILITY"] = "avx512"
FOREIGN = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "MALLOC_", "ATEN_", "DNNL_", "LD_PRELOAD")


def clean_environment(**more):
    """Ours without what would tune or hinder a library."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    return {**kept, **more}


def commit():
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
                              stderr=subprocess.DEVNULL)
    except FileNotFoundError:  # an unpacked archive needs no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def use_carried(folder=ROOT / ".carry"):
    """As use_carried of scripts/debian.sh: headers that scripts/carry has collected, wherever there are some, and Meson and
    ninja where one of them is missing."""
    if not (folder / "include").is_dir():
        return False
    os.environ["CPLUS_INCLUDE_PATH"] = ":".join(filter(None, [str(folder / "include"), os.environ.get("CPLUS_INCLUDE_PATH")]))
    if not (shutil.which("meson") and shutil.which("ninja")):
        os.environ["PATH"] += f":{folder / 'bin'}"
    return True


def ensure_built(build, *targets, mpi="disabled"):
    """Release programs in `build`: all of them, or these targets. A folder that was set up without MPI gets it."""
    use_carried()
    if not (build / "build.ninja").is_file():
        subprocess.run(["meson", "setup", str(build), str(ROOT), "-Dbuildtype=release", "-Dmarch=native",
                        "-Dbench=enabled", "-Dtests=disabled", "-Dexamples=disabled", f"-Dmpi={mpi}"], check=True)
    elif mpi == "enabled" and not all(f"build {t}:" in (build / "build.ninja").read_text(encoding="utf-8") for t in targets):
        subprocess.run(["meson", "configure", str(build), "-Dmpi=enabled"], check=True)
    subprocess.run(["ninja", "-C", str(build), *targets], check=True)


def instruction_set():
    """The widest vectors of this machine, for which a build with -march=native is compiled. Sums of other vectors round
    differently, so that two trainings of one seed agree only on machines of one instruction set."""
    flags = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "not known")


def describe_device():
    """Name and architecture of the first NVIDIA device, under the names that a machine's have; "not known" if no nvidia-smi
    tells."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"], stdout=subprocess.PIPE,
                              text=True, check=True).stdout
        name, capability = told.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return {"machine": "not known", "instruction_set": "not known"}
    return {"machine": name, "instruction_set": "sm_" + capability.replace(".", "")}


def describe_machine():
    model = next((line.split(":", 1)[1].strip() for line in
                  pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("model name")), "?")
    try:
        compiler = subprocess.run(["c++", "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()[0]
    except (FileNotFoundError, IndexError):  # programs that were built elsewhere need none
        compiler = "none here"
    return {"cpu": model, "cores": os.cpu_count(), "compiler": compiler}
