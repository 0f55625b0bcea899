#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""tidy.py [OPTION...] -p BUILD SOURCE: clang-tidy for a source, unless it has found nothing in the same text before.

The text is what the preprocessor makes of the source, with macros and those comments that clang-tidy reads, such as NOLINT.
Preprocessing takes a tenth of clang-tidy's time.
"""
import json
import pathlib
import re
import shlex
import subprocess
import sys

import stamps

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A string or character, which may contain slashes, or a comment to the end of its line.
STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n]){1,4}\'|//[^\n]*')


def without_prose(text):
    """The text without the comments that clang-tidy does not read: rewording a comment is no reason to run it again."""
    def kept(match):
        found = match.group(0)
        return "" if found.startswith("//") and "NOLINT" not in found else found

    return STRING_OR_COMMENT.sub(kept, text)


def preprocessed(build, source):
    """None if the build does not compile the source, or it cannot be preprocessed: clang-tidy says why."""
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if (pathlib.Path(entry["directory"]) / entry["file"]).resolve() == source:
            words = [word for word in shlex.split(entry["command"]) if word not in ("ccache", "-c", "-MD", "-MMD")]
            for option in ("-o", "-MF", "-MQ", "-MT"):
                while option in words:
                    del words[words.index(option) : words.index(option) + 2]
            done = subprocess.run([*words, "-E", "-C", "-dD"], cwd=entry["directory"], capture_output=True, text=True,
                                  errors="replace", check=False)
            return without_prose(done.stdout).replace(str(ROOT), "") if done.returncode == 0 else None
    return None


def main():
    arguments = sys.argv[1:]
    text = preprocessed(pathlib.Path(arguments[arguments.index("-p") + 1]), pathlib.Path(arguments[-1]).resolve())
    key = None
    if text is not None:
        version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True, check=False).stdout
        key = stamps.key(version, (ROOT / ".clang-tidy").read_text(encoding="utf-8"), " ".join(arguments), text)
        if stamps.passed(key):
            print(f"{arguments[-1]}: clean before")
            return 0
    status = subprocess.run(["clang-tidy", "--quiet", *arguments], check=False).returncode
    if status == 0 and key is not None:
        stamps.leave(key)
    return status


if __name__ == "__main__":
    sys.exit(main())
