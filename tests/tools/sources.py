#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lists sources and what each needs beyond the standard library, from its includes.

sources.py ROOT HAVE headers        every public header
sources.py ROOT HAVE DIR            every .cpp directly in DIR (not main.cpp)
sources.py ROOT HAVE 'DIR/**'       also those in the folders of DIR

HAVE names the needs that are installed, joined by commas. Prints one line a file: path relative to ROOT, needs that
are installed, needs that are not, `alone` if it cannot share a program with others (see group.py), the name; with
semicolons between and commas within. The name of DIR/a/b/c.cpp is a_c, the name of DIR/c.cpp is c. Lines have the
order of the names. Meson cannot glob, and no list written by hand stays true.
"""
import pathlib
import re
import sys

# The one table of third-party includes: prefix -> name of the need.
THIRD_PARTY = {
    "mpi.h": "mpi",
    "mpi-ext.h": "mpi",
    "zlib.h": "zlib",
    "nlohmann/": "json",
    "Eigen/": "eigen",
    "unsupported/Eigen/": "eigen",
    "CLI/": "cli11",
    "cuda": "cuda",
    "cublas": "cuda",
    "cusolver": "cuda",
    "cudnn": "cuda",
    "nccl.h": "nccl",
    "torch/": "torch",
    "dlib/": "dlib",
    "onnx/": "onnx",
    "turbojpeg.h": "jpeg",
    "google/protobuf/": "onnx",
}
# What would mean something else within a namespace, or after another file.
ALONE = re.compile(r"^(#\s*(define|undef|pragma)|template <>|struct \w+::\w+<|namespace \w+ \{|.*\boperator new\b)", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def includes(path):
    """The (name, quoted) pairs that a file includes itself."""
    return [(name, mark == '"') for mark, name in INCLUDE.findall(path.read_text(encoding="utf-8"))]


def need_of(name):
    for prefix, need in THIRD_PARTY.items():
        if name.startswith(prefix):
            return need
    return None


def follow(path, root, ours, foreign):
    """Adds a file and every file of ours that it includes to `ours`, and what else they include to `foreign`."""
    if path in ours or not path.is_file():
        return
    ours.add(path)
    for name, quoted in includes(path):
        if quoted:
            follow((path.parent / name).resolve(), root, ours, foreign)
        elif name.startswith("pufferfish/"):
            follow(root / "include" / name, root, ours, foreign)
        else:
            foreign.add(name)


def reached(path, root):
    """A file and every file of ours that it includes, directly or not."""
    ours = set()
    follow(path, root, ours, set())
    return ours


def foreign_includes(path, root):
    """What is not ours among the includes of a file and of every file of ours that it includes."""
    foreign = set()
    follow(path, root, set(), foreign)
    return foreign


def needs(path, root):
    """Needs of a file and of every file of ours that it includes."""
    return {need for name in foreign_includes(path, root) if (need := need_of(name))}


def headers(root):
    return sorted((root / "include" / "pufferfish").rglob("*.hpp"))


def name_of(path, base):
    """The folder directly in `base` that holds the file, if there is one, and the file's name without its ending."""
    below = path.relative_to(base)
    return "_".join([*below.parent.parts[:1], below.stem])


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    have = set(sys.argv[2].split(","))
    if sys.argv[3] == "headers":
        base, files = root / "include" / "pufferfish", headers(root)
    else:
        base = root / sys.argv[3].removesuffix("/**")
        files = sorted((p for p in root.glob(f"{sys.argv[3]}/*.cpp") if p.name != "main.cpp"), key=lambda p: name_of(p, base))
        names = [name_of(path, base) for path in files]
        if len(set(names)) != len(names):
            sys.exit(f"{sys.argv[3]}: two files with one name: {sorted(n for n in set(names) if names.count(n) > 1)}")
    for path in files:
        need = needs(path, root)
        alone = "alone" if ALONE.search(path.read_text(encoding="utf-8")) else ""
        name = path.relative_to(root).as_posix()
        print(f"{name};{','.join(sorted(need & have))};{','.join(sorted(need - have))};{alone};{name_of(path, base)}")


if __name__ == "__main__":
    main()
