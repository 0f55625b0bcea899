#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""missing_kernels.py ROOT -- COMPILER...

A program with PUFFERFISH_SEPARATE_KERNELS and without <pufferfish/kernels.hpp> is refused by the linker, with a name that
says what is missing.
"""
import pathlib
import subprocess
import sys
import tempfile

SOURCE = """
#include <pufferfish/core/separate.hpp>
namespace user {
template <class T>
T twice(T x) { return x + x; }
PUFFERFISH_SEPARATE_FUNCTION(linalg, twice);
}
int main() { return static_cast<int>(user::twice(0.0F)); }
"""
NAME = "a_source_file_must_include_pufferfish_kernels_hpp"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    compiler = [*sys.argv[sys.argv.index("--") + 1:], "-std=c++20", "-O0", f"-I{root / 'include'}"]

    def link(folder, *flags):
        return subprocess.run([*compiler, *flags, "-x", "c++", "-", "-o", str(folder / "program")], input=SOURCE,
                              capture_output=True, text=True, check=False)

    problems = []
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        missing = link(where, "-DPUFFERFISH_SEPARATE_KERNELS")
        if missing.returncode == 0 or NAME not in missing.stderr:
            problems.append(f"without kernels, the linker ended with {missing.returncode} and said:\n{missing.stderr}")
        for flags in [], ["-DPUFFERFISH_COMPILE_KERNELS"], ["-DPUFFERFISH_COMPILE_PARTS", "-DPUFFERFISH_COMPILE_linalg"]:
            done = link(where, *flags)
            if done.returncode != 0:
                problems.append(f"with {flags or 'no flags'}:\n{done.stderr}")
        other = link(where, "-DPUFFERFISH_COMPILE_PARTS", "-DPUFFERFISH_COMPILE_conv")
        if other.returncode == 0:
            problems.append("part `conv` has a function of part `linalg`")
    print("\n".join(problems) or "refused with the name")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
