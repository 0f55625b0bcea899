#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_linkage.py KERNELS.o PROGRAM-OR-LIBRARY...

Two shared objects of one process must each start their own kernels. A kernel with weak or global linkage, or a launcher
that others see, would be taken from whichever object was loaded first, where CUDA has registered another module's. That
two do is a test of its own (libraries/), with few kernels; here it is all of them: of what nvcc has made, every kernel
must be local, and every launcher hidden; and no program or shared library shows either to others.
"""
import re
import subprocess
import sys

SYMBOL = re.compile(r"^\s*\d+: [0-9a-f]+\s+\S+\s+(?P<kind>FUNC|OBJECT)\s+(?P<bind>\S+)\s+(?P<visibility>\S+)\s+(?P<where>\S+)\s+(?P<name>\S+)")
# Of the namespace itself; others may have its types among their arguments.
OURS = re.compile(r"^_ZN?K?10pufferfish\d+v\d+_\d+?11gpu_kernels")


def symbols(path, dynamic):
    command = ["readelf", "-W", "--dyn-syms" if dynamic else "-s", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [m for m in map(SYMBOL.match, text.splitlines()) if m and m["where"] != "UND"]


def main():
    problems = []
    kernels = launchers = 0
    for symbol in symbols(sys.argv[1], dynamic=False):
        name = symbol["name"]
        if "gpu_kernels" not in name:
            continue
        if symbol["bind"] == "LOCAL":
            kernels += 1
        else:
            launchers += 1
            if symbol["visibility"] != "HIDDEN":
                problems.append(f"{name} is {symbol['visibility']}")
        if "__device_stub__" in name and symbol["bind"] != "LOCAL":
            problems.append(f"kernel {name} is {symbol['bind']}")
    for program in sys.argv[2:]:
        problems += [f"{program} shows {s['name']}" for s in symbols(program, dynamic=True) if OURS.match(s["name"])]
    print(f"{kernels} local functions, {launchers} hidden ones, {len(problems)} problems")
    for problem in problems[:20]:
        print(problem)
    if not kernels or not launchers:
        print("nothing was found: has the naming changed?")
        sys.exit(1)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
