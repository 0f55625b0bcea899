#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py CASE -- COMPILER ARGS...

A case is a .cpp file with comment lines
    // expected-error: TEXT [|| TEXT ...]   what the compiler must print (one of the texts; every line must match)
    // expected-first: TEXT                 what the first three lines of the compiler's output must say
    // fail-args: ARGS                      further arguments of the build that must fail
    // last-error: TEXT                     what the last error must say; there may be one error before it
It must compile as it is, and must not with -DPUFFERFISH_FAIL.
"""
import re
import subprocess
import sys


def compile_case(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def main():
    case = sys.argv[1]
    command = [*sys.argv[sys.argv.index("--") + 1:], "-c", case, "-o", "/dev/null"]
    with open(case, encoding="utf-8") as file:
        text = file.read()
    expected = re.findall(r"^// expected-error: (.*)$", text, re.MULTILINE)
    first = re.findall(r"^// expected-first: (.*)$", text, re.MULTILINE)
    extra = [arg for line in re.findall(r"^// fail-args: (.*)$", text, re.MULTILINE) for arg in line.split()]
    if not expected and not first:
        sys.exit(f"{case}: no line `// expected-error: TEXT` or `// expected-first: TEXT`")

    code, output = compile_case(command)
    if code != 0:
        sys.exit(f"{case}: does not compile without PUFFERFISH_FAIL:\n{output}")
    code, output = compile_case([*command, "-DPUFFERFISH_FAIL", *extra])
    if code == 0:
        sys.exit(f"{case}: compiles although it must not")
    # A compiler may break our line at its own width or quote it: compare without extra white space.
    start = "\n".join(output.split("\n")[:3])
    wanted = [(line, output, "lines") for line in expected] + [(line, start, "first three lines") for line in first]
    for line, place, where in wanted:
        squeezed = re.sub(r"\s+", " ", place)
        if not any(re.sub(r"\s+", " ", choice.strip()) in squeezed for choice in line.split("||")):
            sys.exit(f"{case}: the {where} of the error do not say\n  {line}\nbut\n{output}")
    errors = [line for line in output.splitlines() if re.search(r"\b(error|warning): ", line)]
    for line in re.findall(r"^// last-error: (.*)$", text, re.MULTILINE):
        if len(errors) > 2 or line not in errors[-1]:
            sys.exit(f"{case}: more is said than the error\n{output}")


if __name__ == "__main__":
    main()
