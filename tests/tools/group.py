#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""group.py OUTPUT SOURCE...: one source that holds several tests, each in a namespace of its own.

What tests share (headers, and the templates that they instantiate) is then compiled once for all of them: building
takes about half the time. The includes of all of them come first; what each includes again is skipped by its guard.
"""
import os
import pathlib
import re
import sys

INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)


def main():
    output, sources = pathlib.Path(sys.argv[1]), [pathlib.Path(name).resolve() for name in sys.argv[2:]]

    def named(path):
        """Relative to the output, so that the text does not depend on where the checkout is."""
        return pathlib.Path(os.path.relpath(path, output.resolve().parent)).as_posix()

    includes = {}  # in order, each once
    for source in sources:
        for line in INCLUDE.findall(source.read_text(encoding="utf-8")):
            name = line.split("include", 1)[1].strip()
            if name.startswith('"'):
                name = f'"{named(source.parent / name.strip(chr(34)))}"'
            includes[name] = None
    lines = [f"#include {name}" for name in includes]
    for source in sources:
        lines += [f"namespace group_of_{source.stem} {{", f'#include "{named(source)}"', "}"]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
