#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_doxygen.py ROOT

Runs Doxygen over the public headers, as docs/Doxyfile says: a warning is a failure. What it writes is thrown away.
Exit code 77 (skipped) where there is no Doxygen.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    doxygen = shutil.which("doxygen")
    if doxygen is None:
        print("doxygen is not installed")
        sys.exit(77)
    with tempfile.TemporaryDirectory(prefix="pufferfish-doxygen-") as scratch:
        options = (root / "docs" / "Doxyfile").read_text(encoding="utf-8") + f"\nOUTPUT_DIRECTORY = {scratch}\n"
        result = subprocess.run([doxygen, "-"], input=options, cwd=root, check=False, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        pages = list(pathlib.Path(scratch, "html").glob("*LowRankConv.html"))
    warnings = sorted(set(result.stdout.splitlines()))
    print("\n".join(line.replace(f"{root}/", "") for line in warnings))
    if warnings or result.returncode != 0:
        sys.exit(f"doxygen: exit code {result.returncode}, {len(warnings)} lines of warnings")
    if len(pages) != 1:
        sys.exit("doxygen has no page of LowRankConv: does it read the headers?")


if __name__ == "__main__":
    main()
