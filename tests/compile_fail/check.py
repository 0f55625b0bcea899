#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py FOLDER CASE... -- COMPILER ARGS...

A case is a .cpp file that declares everything in a namespace of the file's name, with comment lines
    // expected-error: TEXT [|| TEXT ...]   text of an error of the case (one of the texts; every line must match)
    // expected-first: TEXT                 text of the first error of the case, in the case itself: nothing is before it
    // fail-args: ARGS                      further arguments of the compilation that must fail
    // last-error: TEXT                     text of the last error; at most one error may stand before it
It must compile as it is, and must not with -DPUFFERFISH_FAIL.

The headers take most of the time to compile, so the cases share a source (in FOLDER): one compilation of all of them
as they are, and one with -DPUFFERFISH_FAIL. An error of the latter belongs to the case that it is in, or that led to
the instantiation of the template that it is in; an error that belongs to no case is a problem as well. Only the failing compilation of a case with `fail-args` is its own.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

INCLUDE = re.compile(r"^#include (<.*>)$", re.MULTILINE)
ERROR = re.compile(r"(?:fatal )?error: ")
# What g++ prints before an error about where it is, and both compilers about who instantiated a template.
CONTEXT = re.compile(r": (In |At )|:   (required |recursively required )|^(In file included from|  +from) ")
INCLUDED = re.compile(r"^(In file included from|  +from) ")
INSTANTIATED = re.compile(r":   (?:recursively )?required |: note: in instantiation of .* requested here")


class Case:
    def __init__(self, path):
        self.path, self.name = path, path.stem
        text = path.read_text(encoding="utf-8")

        def lines(kind):
            return re.findall(rf"^// {kind}: (.*)$", text, re.MULTILINE)

        self.includes = INCLUDE.findall(text)
        self.expected, self.first, self.last = lines("expected-error"), lines("expected-first"), lines("last-error")
        self.fail_args = [arg for line in lines("fail-args") for arg in line.split()]

    def contains(self, line):
        """Whether a line of the compiler's output names a place in the case."""
        return re.search(rf"(^|[\s/]){re.escape(self.path.name)}:\d+:", line) is not None

    def instantiates(self, line):
        """Whether a line says that the case, or a type of its namespace, led to the instantiation of a template."""
        return bool(INSTANTIATED.search(line)) and (self.contains(line) or f"{self.name}::" in line)


def errors_of(output):
    """The errors of a compiler's output: lists of lines (those of g++ before the error, the error, its notes), each
    with the index of the line that says `error:`."""
    found, context = [], []
    for line in output.splitlines():
        if ERROR.search(line):
            found.append(([*context, line], len(context)))
            context = []
        elif CONTEXT.search(line):
            context.append(line)
        else:
            if found:
                found[-1][0].extend([*context, line])
            context = []
    return found


def belongs_to(error, case):
    lines, at = error
    return case.contains(lines[at]) or any(case.instantiates(line) for line in lines)


def says(text, line):
    """Compared without extra white space: a compiler may break a line of ours at its own width, or quote it."""
    squeezed = re.sub(r"\s+", " ", text)
    return any(re.sub(r"\s+", " ", choice.strip()) in squeezed for choice in line.split("||"))


def problem(case, errors):
    """What is wrong with the errors of a case; None if all is well."""
    if not case.expected and not case.first:
        return "has no line `// expected-error: TEXT` or `// expected-first: TEXT`"
    if not errors:
        return "compiles with PUFFERFISH_FAIL although it must not"
    output = "\n".join(line for lines, _ in errors for line in lines)
    for line in case.expected:
        if not says(output, line):
            return f"the errors do not say\n  {line}\nbut\n{output}"
    lines, at = errors[0]
    before = [line for line in lines[:at] if not INCLUDED.search(line)]
    for line in case.first:
        if not case.contains(lines[at]) or len(before) > 2 or not says(lines[at], line):
            return f"the first error is not in the case and says\n  {line}\nbut\n{output}"
    for line in case.last:
        lines, at = errors[-1]
        if len(errors) > 2 or line not in lines[at]:
            return f"more is said than the error\n{output}"
    return None


def main():
    end = sys.argv.index("--")
    folder, cases = pathlib.Path(sys.argv[1]), [Case(pathlib.Path(name).resolve()) for name in sys.argv[2:end]]
    compiler = [*sys.argv[end + 1:]]
    # All errors, with all that led to them; g++ and clang++ do not both know each of these flags.
    full = [flag for flag in ("-ftemplate-backtrace-limit=0", "-ferror-limit=0")
            if subprocess.run([*compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True,
                              check=False).returncode == 0]

    def compiled(source, *arguments):
        made = folder / f"{source.stem}.o"
        done = subprocess.run([*compiler, *full, *arguments, "-c", str(source), "-o", str(made)], capture_output=True,
                              text=True, check=False, env={**os.environ, "LC_ALL": "C"})
        return done.returncode, done.stdout + done.stderr

    shared = [case for case in cases if not case.fail_args]

    def joined(name, members):
        # Headers first: no error then has a stack of includes that names a case other than its own.
        lines = [f"#include {header}\n" for header in dict.fromkeys(h for case in members for h in case.includes)]
        lines += [f'#include "{case.path}"\n' for case in members]
        source = folder / f"{name}.cpp"
        source.write_text("".join(lines), encoding="utf-8")
        return source

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        whole = pool.submit(compiled, joined("cases", cases))
        failing = pool.submit(compiled, joined("failing_cases", shared), "-DPUFFERFISH_FAIL")
        alone = {case: pool.submit(compiled, case.path, "-DPUFFERFISH_FAIL", *case.fail_args)
                 for case in cases if case.fail_args}
        code, output = whole.result()
        problems = [f"a case does not compile without PUFFERFISH_FAIL:\n{output}"] if code != 0 else []
        errors = errors_of(failing.result()[1])
        for case in cases:
            own = errors_of(alone[case].result()[1]) if case in alone else [e for e in errors if belongs_to(e, case)]
            if (wrong := problem(case, own)) is not None:
                problems.append(f"{case.name}: {wrong}")
        # An error that no case has asked for would hide among the others.
        for lines, at in errors:
            if not any(belongs_to((lines, at), case) for case in shared):
                problems.append("an error of no case:\n" + "\n".join(lines))
    print("\n".join(problems))
    print(f"{len(cases)} cases, {len(problems)} problems")
    return 1 if problems or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
