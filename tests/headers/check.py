#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py ROOT HAVE BUILD [FLAG...]

Every public header stands alone and bears being included twice: it includes a header for each name of the standard
library that it uses, and is read by itself, behind nothing but standard headers (compiled once for all: reading them
takes most of the time) and its host's, with the flags that BUILD compiles tests/headers/all.cpp with and those given.
Of headers that need what is not installed only the includes are checked; they are named.
"""
import concurrent.futures
import functools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import standard
from standard import sources


def flags(build):
    """The compiler and its flags, without what names files."""
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if entry["file"].endswith("headers/all.cpp"):
            words = iter(shlex.split(entry["command"]))
            return [word for word in words
                    if not (word in ("-o", "-MF", "-MQ") and next(words)) and word not in ("-c", "-MD", entry["file"])]
    raise SystemExit(f"{build}: headers/all.cpp is not compiled here")


def main():
    root, have, build = pathlib.Path(sys.argv[1]).resolve(), set(sys.argv[2].split(",")), pathlib.Path(sys.argv[3])
    command = flags(build) + sys.argv[4:]
    chosen = {path: sources.needs(path, root) for path in sources.headers(root)}

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        def run(arguments, text):
            # In the build folder: relative include paths are relative to it.
            return subprocess.run([*command, *arguments], input=text, capture_output=True, text=True, cwd=build, check=False)

        @functools.cache
        def prelude(*hosts):
            """The standard headers and those of hosts, compiled; the name to include them by."""
            name = pathlib.Path(folder) / ("-".join(["standard", *hosts]) + ".hpp")
            lines = [f"#include <{header}>\n" for header in [*standard.STANDARD, *(standard.HOSTS[h] for h in hosts)]]
            name.write_text("".join(lines), encoding="utf-8")
            done = run(["-x", "c++-header", str(name), "-o", f"{name}.gch"], "")
            if done.returncode:
                raise SystemExit(f"{' '.join(lines)}\n{done.stderr[:4000]}")
            return name

        def hosts_of(path):
            return sorted(chosen[path] & set(standard.HOSTS))

        def check(path):
            missing = standard.undeclared(path, root)
            problems = [f"uses {', '.join(names)} without <{header}>" for header, names in missing.items()]
            if not chosen[path] <= have:
                print(f"not compiled: {path.relative_to(root)} (needs {', '.join(sorted(chosen[path] - have))})")
                return path, problems
            include = f"#include <{path.relative_to(root / 'include').as_posix()}>\n"
            done = run(["-include", str(prelude(*hosts_of(path))), "-fsyntax-only", "-x", "c++", "-"], 2 * include)
            if done.returncode or done.stderr:
                problems.append(f"does not stand alone:\n{done.stderr[:4000]}")
            return path, problems

        for path in chosen:  # before the threads, which would each make their own
            if chosen[path] <= have:
                prelude(*hosts_of(path))
        failed = 0
        for path, problems in pool.map(check, chosen):
            failed += bool(problems)
            for problem in problems:
                print(f"{path.relative_to(root)} {problem}", file=sys.stderr)
    print(f"{len(chosen)} headers, {failed} of them wrong")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
