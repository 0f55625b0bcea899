#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""flags.py ROOT -- COMPILER...

Objects whose compiler flags differ share no symbol of the library except those of the stable namespace (which the
linker would keep once, with the code of either), and flags that change what code may contain change the ABI namespace.
"""
import functools
import pathlib
import re
import subprocess
import sys
import tempfile

# Pairs of which each has code that the other's processor or program may not have.
PAIRS = [
    ("-march=x86-64", "-march=x86-64 -mavx2"),
    ("-march=x86-64-v3", "-march=x86-64 -mavx2 -mfma"),
    ("-march=skylake-avx512", "-march=sapphirerapids"),
    ("-march=armv8-a", "-march=armv8.2-a+sve"),
    ("", "-fno-exceptions"),
    ("", "-fno-rtti"),
    ("", "-ffast-math"),
    ("", "-DPUFFERFISH_THROW(e)=std::terminate()"),
    ("", "-DPUFFERFISH_ASSERT_LEVEL=0"),
]
# One name each.
ALL = ["-march=" + name for name in
       "x86-64 nehalem haswell skylake skylake-avx512 cascadelake cooperlake icelake-server "
       "sapphirerapids alderlake knl knm bdver2 znver1".split()]
ALL += ["-march=x86-64 -m" + name for name in
        "avx avx2 fma f16c bmi bmi2 lzcnt movbe popcnt sse3 ssse3 sse4.1 xop tbm fma4 gfni avxvnni avx512f avx512vl avx512bw "
        "avx512dq avx512cd avx512vnni avx512bf16 avx512fp16 avx512ifma avx512vbmi avx512vbmi2 avx512bitalg "
        "avx512vpopcntdq".split()]
ALL += ["-march=" + name for name in "armv8-a armv8.1-a armv8.2-a+dotprod armv8.2-a+fp16 armv8.2-a+sve armv8.6-a".split()]
ALL += ["-ffast-math", "-ffinite-math-only", "-fno-exceptions", "-fno-rtti", "-fopenmp", "-DPUFFERFISH_THROW=x"]
# Their differences are instructions that compilers use only where a program names them.
SAME = [{"haswell", "skylake"}, {"cascadelake", "skylake-avx512"}]

SOURCE = """
#include <cstdio>
#include <exception>
#include <pufferfish/core/context.hpp>
#include <pufferfish/core/error.hpp>
int main() {
  using namespace pufferfish;
  cpu_context ctx({2, 0});
  tensor<double, 2> squares({8, 8});
  ctx.parallel_for(8, [&](index_t i, int) { for (index_t j = 0; j < 8; ++j) squares(i, j) = double(i * j); });
  fill_normal(squares.flat(), 1.0, {1, 2});
  parameter<float> p(logical_layout::kernel(2, 3, 1, 1), parameter_role::weight);
  ctx.tape().push<float, 2>({3, 4});
  return std::printf("%s", to_string(p.layout()).c_str()) < 0;
}
"""


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    compiler = [*sys.argv[sys.argv.index("--") + 1:], "-std=c++20", f"-I{root / 'include'}"]

    def run(flags, *arguments, text):
        return subprocess.run([*compiler, *flags.split(), *arguments, "-x", "c++", "-"], input=text, capture_output=True,
                              text=True, check=False)

    def known(flags):
        return run(flags, "-fsyntax-only", text="int i;").returncode == 0

    def namespace(flags):
        done = run(flags, "-E", "-P", text="#include <pufferfish/core/config.hpp>\nPUFFERFISH_ABI_NAMESPACE\n")
        return done.stdout.split()[-1]

    names = {}
    for flags in [""] + [flags for flags in ALL if known(flags)]:
        names.setdefault(namespace(flags), []).append(flags)
    plain = names.pop(namespace(""))
    problems = [f"{name}: {' and '.join(same)} have one name" for name, same in names.items() if len(same) > 1 and
                {flags.split("=")[-1] for flags in same} not in SAME]
    if not set(plain) <= {"", "-march=x86-64", "-march=armv8-a"}:
        problems.append(f"{plain} have one name")
    bad = [name for name in names if not re.fullmatch(r"v\d+_\d+_a\d_\w+", name)]
    problems += [f"no name: {name}" for name in bad]

    stable = re.compile(r"10pufferfish\d+v\d+_\d+[^_\d]")
    compared = 0
    with tempfile.TemporaryDirectory() as folder:
        @functools.cache
        def symbols(flags):
            made = pathlib.Path(folder) / "object.o"
            done = run(flags, "-O0", "-c", "-o", str(made), text=SOURCE)
            if done.returncode:
                sys.exit(f"{flags}:\n{done.stderr}")
            listed = subprocess.run(["nm", "--defined-only", "-P", made], capture_output=True, text=True, check=True).stdout
            return {line.split()[0] for line in listed.splitlines()}

        for pair in PAIRS:
            if not all(map(known, pair)):
                print("not compared, since the compiler does not know them:", *pair)
                continue
            one, other = ({name for name in symbols(flags) if "10pufferfish" in name} for flags in pair)
            compared += 1
            if min(len(one), len(other)) < 50:
                problems.append(f"{pair}: only {len(one)} and {len(other)} symbols")
            shared = {name for name in one & other if not stable.search(name)}
            problems += [f"{' and '.join(pair)} share {name}" for name in sorted(shared)[:10]]
    print("\n".join(problems))
    print(f"{len(names) + 1} names, {compared} pairs compared, {len(problems)} problems")
    return 1 if problems or compared < 5 else 0


if __name__ == "__main__":
    sys.exit(main())
