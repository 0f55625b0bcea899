#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py ROOT HAVE BUILD

Every public header stands alone and bears being included twice: each is read by itself with the flags that BUILD
compiles tests/headers/all.cpp with. Headers that need what is not installed are left out and named.
"""
import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import sources  # noqa: E402  (its folder is no package)


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
    command = flags(build) + ["-fsyntax-only", "-x", "c++", "-"]

    def check(path):
        include = f"#include <{path.relative_to(root / 'include').as_posix()}>\n"
        # In the build folder: relative include paths are relative to it.
        return path, subprocess.run(command, input=2 * include, capture_output=True, text=True, cwd=build, check=False)

    chosen = []
    for path in sources.headers(root):
        missing = sources.needs(path, root) - have
        if missing:
            print(f"left out: {path.relative_to(root)} (needs {', '.join(sorted(missing))})")
        else:
            chosen.append(path)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, done in pool.map(check, chosen):
            if done.returncode or done.stderr:
                failed += 1
                print(f"{path.relative_to(root)} does not stand alone:\n{done.stderr[:4000]}", file=sys.stderr)
    print(f"{len(chosen)} headers, {failed} of them wrong")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
