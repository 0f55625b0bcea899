#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_layout.py ROOT

Holds the sources against the rules of the layout: the order and size of the folders, what umbrella headers may pull in, no
<iostream>, the length of headers, SPDX lines, plain words. Includes are followed whether or not the compiler would reach them: an
include within #if counts, and so do those of headers that need what is not installed.
"""
import collections
import functools
import os
import pathlib
import re
import sys

from sources import headers, includes, need_of

# A folder may include itself and what stands before it.
ORDER = ["core", "io", "linalg", "ops", "lowrank", "nn", "optim", "distributed", "compress", "prune", "weights", "models",
         "train", "adapters"]
# Folders that stand before another in ORDER and may still not be included by it: computation reads no files, and files
# of weights are factorized without the network.
MAY_NOT = {folder: {"io"} for folder in ("linalg", "ops", "lowrank", "nn", "optim", "distributed", "compress", "prune")}
MAY_NOT["weights"] = {"nn", "optim", "distributed", "compress", "prune"}
# gpu stands apart: it may use all of ORDER but the adapters, and only gpu.hpp may include it.
GPU_MAY = ORDER[: ORDER.index("train") + 1] + ["gpu"]
# Umbrella headers: the last folder of ORDER they may reach, folders left out, third parties they may pull in. One may
# include those that stand before it here.
UMBRELLAS = {
    "lowrank.hpp": ("lowrank", {"io"}, set()),
    "nn.hpp": ("optim", {"io"}, set()),
    "kernels.hpp": ("optim", {"io"}, set()),
    "distributed.hpp": ("compress", {"io"}, {"mpi"}),
    "train.hpp": ("train", set(), {"zlib", "json"}),
    "gpu.hpp": ("train", set(), {"cuda", "zlib", "json"}),
    "pufferfish.hpp": ("train", set(), {"zlib", "json", "mpi"}),
}
# Third parties that a folder's own headers may name.
MAY_NAME = {"io": {"zlib", "json"}, "linalg": {"eigen"}, "distributed": {"mpi"}, "gpu": {"cuda", "mpi", "nccl"},
            "adapters": {"eigen", "torch", "dlib", "onnx", "jpeg"}}
MAX_LINES = 350
MAX_FILES = 30  # of a folder
# Numbers as text and back, in the locale of the process.
FOLLOWS_LOCALE = re.compile(r"\b(strto[dfl]d?|sto[df]|stold|atof|v?sn?printf)\(")
# What an #error of ours is followed by, so that the compiler stops there.
STOPS = "pufferfish/stopped_by_the_error_above"
# A macro that names a file to include.
FILE_MACRO = re.compile(r'^\s*#\s*define\s+\w+_FILE\s+([<"])([^>"]+)[>"]', re.MULTILINE)
# A template that kernels.hpp compiles.
SEPARATE = re.compile(r"^PUFFERFISH_SEPARATE_(FUNCTION|OPERATION|CLASS)\(", re.MULTILINE)
# What follows __global__: a first parameter and a first statement.
WAITS = re.compile(r"[^{;]*\(grid_dependency earlier\b[^{;]*\{\s*earlier\.wait\(\);")
# Words to replace by another subject or a named relation: "after", "stored at", "no rank", "N rows".
RETIRED = re.compile(r"\b(behind|in front of|next to|(some|any|every)(body|one)|nobody|no one|whoever|lies?|lying|at hand|"
                     r"so many|so much|towards? (the|its) (in|out)put|distance between (rows|columns))\b", re.IGNORECASE)
PROSE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')  # of C++
SPDX = "SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception"
SPDX_KINDS = {".hpp", ".inc", ".cuh", ".cpp", ".cu", ".py", ".sh", ".in", ".build", ".cmake", ".yml"}
SPDX_NAMES = {"CMakeLists.txt", "meson_options.txt", "run", "compile_time", ".clang-format", ".clang-tidy"}


def folder_of(name):
    return name.split("/")[0] if "/" in name else ""


def allowed_folders(name):
    folder = folder_of(name)
    if folder == "gpu":
        return set(GPU_MAY)
    if folder:
        return set(ORDER[: ORDER.index(folder) + 1]) - MAY_NOT.get(folder, set()) if folder in ORDER else None
    if name in UMBRELLAS:
        last, without, _ = UMBRELLAS[name]
        return set(ORDER[: ORDER.index(last) + 1]) - without | ({"gpu"} if name == "gpu.hpp" else set())
    return None


def umbrellas_before(name):
    names = list(UMBRELLAS)
    return names[: names.index(name)] if name in names else []


@functools.cache
def direct(path, include):
    """The files of ours that a file includes itself, and the names of those that are not there."""
    found, missing = [], []
    named = [(name, mark == '"') for mark, name in FILE_MACRO.findall(path.read_text(encoding="utf-8"))]
    for name, quoted in includes(path) + named:
        if name != STOPS and (quoted or name.startswith("pufferfish/")):
            # As a compiler does: beside the file first, if quoted.
            places = ([path.parent / name] if quoted else []) + [include / name]
            there = [place.resolve() for place in places if place.is_file()]
            (found if there else missing).append(there[0] if there else name)
    return found, missing


@functools.cache
def third_parties_of(path):
    return {need_of(name) for name, _ in includes(path)}


def reached(path, include):
    """Every file of ours that a header includes, directly or not, in the order of their names."""
    found, left = set(), [path]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += direct(file, include)[0]
    return sorted(found)


def check_header(root, path):
    base = root / "include" / "pufferfish"
    name = path.relative_to(base).as_posix()
    allowed = allowed_folders(name)
    if allowed is None:
        return [f"{name}: neither an umbrella header nor in a folder of the layout"]
    problems = []
    third_parties = set()
    problems += [f"{name} includes {missing}, which does not exist" for missing in direct(path, base.parent)[1]]
    for resolved in reached(path, base.parent):
        if resolved == path or base not in resolved.parents:
            continue
        other = resolved.relative_to(base).as_posix()
        if not folder_of(other) and other not in umbrellas_before(name):
            problems.append(f"{name} includes the umbrella header {other}")
        elif folder_of(other) and folder_of(other) not in allowed:
            problems.append(f"{name} reaches {other}, which its folder may not")
        third_parties |= third_parties_of(resolved)
    own = {need_of(n) for n, _ in includes(path)} - {None}
    for need in sorted(own - MAY_NAME.get(folder_of(name), set())):
        problems.append(f"{name} includes a header of {need}, which its folder may not name")
    if name in UMBRELLAS:
        for need in sorted(third_parties - {None} - UMBRELLAS[name][2]):
            problems.append(f"{name} pulls in {need}")
    for call in sorted(set(FOLLOWS_LOCALE.findall(path.read_text(encoding="utf-8")))):
        problems.append(f"{name} calls {call}, which follows the locale: core/number_text.hpp does not")
    if "iostream" in {n for n, _ in includes(path)}:
        problems.append(f"{name} includes <iostream>")
    return problems


def check_folders(root):
    """No folder of headers is wide, and README's table names each of them."""
    base = root / "include" / "pufferfish"
    readme = (root / "README.md").read_text(encoding="utf-8")
    problems = []
    for folder, count in sorted(collections.Counter(p.parent for p in base.rglob("*") if p.is_file()).items()):
        name = folder.relative_to(base).as_posix()
        if count > MAX_FILES:
            problems.append(f"{name} has {count} files, more than {MAX_FILES}")
        if folder != base and f"`{name}`" not in readme:
            problems.append(f"README.md does not name the folder {name}")
    return problems


def check_kernels(files, include):
    """kernels.hpp reaches every header whose templates programs with separate kernels only declare."""
    base = include / "pufferfish"
    there = set(reached(base / "kernels.hpp", include))
    return [f"{path.relative_to(base)} has separate templates, and kernels.hpp does not include it" for path in files
            if SEPARATE.search(path.read_text(encoding="utf-8")) and path.resolve() not in there]


def check_waits(path):
    """Every kernel waits for earlier work of its stream before anything else (gpu/kernels/overlap.cuh)."""
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    return [f"{path.name}: a kernel does not begin with earlier.wait()" for kernel in text.split("__global__")[1:]
            if not WAITS.match(kernel)]


def check_text(root):
    """Every source begins with its license, and no source or page has a retired word."""
    problems = []
    for directory, folders, files in os.walk(root):
        folders[:] = [f for f in folders
                      if (not f.startswith((".", "build")) or f == ".ci") and f not in ("data", "__pycache__")]
        for name in files:
            path = pathlib.Path(directory) / name
            text = path.read_text(encoding="utf-8", errors="replace") if path.suffix in SPDX_KINDS | {"", ".md", ".txt"} else ""
            prose = "\n".join(PROSE.findall(text)) if path.suffix in (".hpp", ".inc", ".cuh", ".cpp", ".cu") else text
            if name not in ("LICENSE", pathlib.Path(__file__).name):
                problems += [f"{path.relative_to(root)}: '{match[0]}'" for match in RETIRED.finditer(prose)]
            if path.suffix not in SPDX_KINDS and name not in SPDX_NAMES:
                continue
            head = text.splitlines()[:2]
            if not head or not any(SPDX in line for line in head[: 2 if head[0].startswith("#!") else 1]):
                problems.append(f"{path.relative_to(root)}: no SPDX line at its top")
    return problems


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    files = headers(root)
    if not files:
        sys.exit("no headers found")
    problems = [problem for path in files for problem in check_header(root, path)]
    for path in sorted((root / "include" / "pufferfish").rglob("*.cuh")):
        if re.search(r"#\s*include\s*<(unsupported/)?Eigen/", path.read_text(encoding="utf-8")):
            problems.append(f"{path.name}: Eigen in a .cuh")
        problems += check_waits(path)
    for path in sorted(p for p in (root / "include").rglob("*") if p.is_file()):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            problems.append(f"{path.relative_to(root)} has {lines} lines, more than {MAX_LINES}")
    problems += check_kernels(files, root / "include")
    problems += check_folders(root)
    problems += check_text(root)
    print("\n".join(problems))
    print(f"{len(files)} headers checked, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
