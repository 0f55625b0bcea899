#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""runnable.py BUILD: names of the tests whose programs were built. Meson runs none at all if one is missing."""
import json
import pathlib
import sys


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    tests = json.loads((build / "meson-info" / "intro-tests.json").read_text(encoding="utf-8"))
    for test in tests:
        own = [pathlib.Path(word) for word in test["cmd"] if word.startswith(f"{build}/")]
        if all(path.exists() for path in own):
            print(test["name"])


if __name__ == "__main__":
    main()
