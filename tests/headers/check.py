#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py ROOT HAVE BUILD CLANG [FLAG...]

Every public header stands alone and bears being included twice: it includes a header for each name of the standard
library that it uses, declares or includes each other name that it uses, and begins with #pragma once.

CLANG (clang++; `-` if there is none) reads all headers in one process, each as a module of its own, in which only the
names are visible that the header's own includes declare. Headers of others (the standard library, MPI, Eigen, dlib) come
before all modules and are visible in each. Headers that need libtorch, which clang++ cannot compile as C++20, and all
headers where there is no clang++, are read one by one by the compiler of BUILD, with the flags that BUILD compiles
tests/headers/all.cpp with and those given, after nothing but the headers of others, which are compiled once for all.
A header that was read so before is not read again while nothing in its text has changed (tools/stamps.py).
Of headers that need what is not installed only the includes are checked; they are named.
"""
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import standard
from standard import sources
import stamps  # in tools, as sources is

# In an order in which one needs nothing of a later one.
LATE = ["mpi-ext.h"]
ONCE = re.compile(r"\s*(//[^\n]*\n\s*)*#pragma once\n")
# A place in a header of ours, in the output of a compiler.
PLACE = re.compile(r"^(\S+?):\d+:\d+: (?:fatal )?(?:error|warning): ", re.MULTILINE)


def flags(build):
    """The compiler and its flags, without what names files."""
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if entry["file"].endswith("headers/all.cpp"):
            words = iter(shlex.split(entry["command"]))
            return [word for word in words
                    if not (word in ("-o", "-MF", "-MQ") and next(words)) and word not in ("-c", "-MD", entry["file"])]
    raise SystemExit(f"{build}: headers/all.cpp is not compiled here")


class Checker:
    def __init__(self, root, have, build, folder, more):
        self.root, self.build, self.folder = root, build, folder
        self.command = flags(build) + more
        self.needs = {path: sources.needs(path, root) for path in sources.headers(root)}
        self.compiled = [path for path, needs in self.needs.items() if needs <= have]

    def run(self, command, text=""):
        # In the build folder: relative include paths are relative to it.
        return subprocess.run(command, input=text, capture_output=True, text=True, cwd=self.build, check=False)

    def wrong_includes(self, path):
        missing = standard.undeclared(path, self.root)
        problems = [f"uses {', '.join(names)} without <{header}>" for header, names in missing.items()]
        if not ONCE.match(path.read_text(encoding="utf-8")):
            problems.append("does not begin with #pragma once")
        return problems

    def as_modules(self, clang, paths):
        """What is wrong with headers, each read as a module of one compilation: {path: problems}."""
        foreign = set(standard.STANDARD).union(*(sources.foreign_includes(path, self.root) for path in paths))
        before = self.folder / "foreign.hpp"
        # A header may do without what is not installed; one that does not fails by itself.
        before.write_text("".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n"
                                  for name in sorted(foreign, key=lambda n: (n in LATE, n))), encoding="utf-8")
        modules = self.folder / "module.modulemap"
        modules.write_text("module headers {\n" + "".join(f'module header_{i} {{ header "{path}" export * }}\n'
                                                          for i, path in enumerate(paths)) + "}\n", encoding="utf-8")
        kept = [word for word in self.command if re.match(r"-(std=|I|isystem|D|m|Wall|Wextra|Wconv|Wshadow|Wsign)", word)]
        done = self.run([clang, *kept, "-Wno-unknown-warning-option", "-ferror-limit=0", "-include", str(before),
                         "-Xclang", "-emit-module", "-Xclang", "-fmodules", "-Xclang", "-fmodules-local-submodule-visibility",
                         "-fno-implicit-modules", "-fmodule-name=headers", "-x", "c++", "-c", str(modules),
                         "-o", str(self.folder / "headers.pcm")])
        if done.returncode == 0 and not done.stderr:
            return {}
        named = {(self.build / name).resolve() for name in PLACE.findall(done.stderr)} & set(paths)
        return {path: ["does not stand alone"] for path in named} | {"All headers": [f"as modules:\n{done.stderr[:20000]}"]}

    @functools.cache
    def prelude(self, *hosts):
        """The standard headers and those of hosts, compiled: the name to include them by, and their text."""
        name = self.folder / ("-".join(["standard", *hosts]) + ".hpp")
        lines = [f"#include <{header}>\n" for header in [*standard.STANDARD, *(standard.HOSTS[h] for h in hosts)]]
        name.write_text("".join(lines), encoding="utf-8")
        text = self.run([*self.command, "-E", "-P", "-dD", str(name)]).stdout
        return name, text

    @functools.cache
    def compile_prelude(self, *hosts):
        name, _ = self.prelude(*hosts)
        done = self.run([*self.command, "-x", "c++-header", str(name), "-o", f"{name}.gch"])
        if done.returncode:
            raise SystemExit(f"{name.read_text(encoding='utf-8')}\n{done.stderr[:4000]}")

    def one_by_one(self, paths, pool):
        hosts = {path: sorted(self.needs[path] & set(standard.HOSTS)) for path in paths}
        version = self.run([self.command[0] if self.command[0] != "ccache" else self.command[1], "--version"]).stdout

        def key(path):
            ours = sorted(sources.reached(path, self.root))
            return stamps.key(version, " ".join(self.command), self.prelude(*hosts[path])[1], str(path.relative_to(self.root)),
                              *(part.read_text(encoding="utf-8") for part in ours))

        keys = {path: key(path) for path in paths}
        left = [path for path in paths if not stamps.passed(keys[path])]
        for path in left:  # before the threads, which would each make their own
            self.compile_prelude(*hosts[path])

        def check(path):
            include = f"#include <{path.relative_to(self.root / 'include').as_posix()}>\n"
            done = self.run([*self.command, "-include", str(self.prelude(*hosts[path])[0]), "-fsyntax-only", "-x", "c++", "-"],
                            2 * include)
            if done.returncode or done.stderr:
                return path, [f"does not stand alone:\n{done.stderr[:4000]}"]
            stamps.leave(keys[path])
            return path, []

        return dict(pool.map(check, left))


def check(checker, have, clang):
    root = checker.root
    problems = {path: checker.wrong_includes(path) for path in checker.needs}
    for path in sorted(set(checker.needs) - set(checker.compiled)):
        print(f"not compiled: {path.relative_to(root)} (needs {', '.join(sorted(checker.needs[path] - have))})")
    alone = [path for path in checker.compiled if clang == "-" or "torch" in checker.needs[path]]
    modules = [path for path in checker.compiled if path not in alone]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [pool.submit(checker.as_modules, clang, modules)] if modules else []
        for results in [checker.one_by_one(alone, pool), *(f.result() for f in found)]:
            for path, more in results.items():
                problems.setdefault(path, []).extend(more)
    failed = 0
    for path, messages in problems.items():
        failed += bool(messages)
        for message in messages:
            print(f"{path.relative_to(root) if isinstance(path, pathlib.Path) else path} {message}", file=sys.stderr)
    print(f"{len(checker.needs)} headers, {len(modules)} of them read as modules, {len(alone)} alone; {failed} are wrong")
    return 1 if failed or not checker.compiled else 0


def main():
    root, have, build, clang = pathlib.Path(sys.argv[1]).resolve(), set(sys.argv[2].split(",")), *sys.argv[3:5]
    with tempfile.TemporaryDirectory() as folder:
        return check(Checker(root, have, pathlib.Path(build).resolve(), pathlib.Path(folder), sys.argv[5:]), have, clang)


if __name__ == "__main__":
    sys.exit(main())
