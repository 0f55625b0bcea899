#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""make_unicode_tables.py           writes unicode_tables.hpp, in the folder of this script, from Python's unicodedata
make_unicode_tables.py --check   compares unicode_tables.hpp with what would be written

Needs a Python whose unicodedata has the version that the file names: tables of another version are no difference.
"""
import pathlib
import sys
import unicodedata

TARGET = pathlib.Path(__file__).resolve().parent / "unicode_tables.hpp"
VERSION = "14.0.0"
LAST = 0x10FFFF
# The order of the enumerators of char_class.
CLASSES = {"L": 0, "M": 1, "N": 2, "P": 3, "S": 4, "space": 5, "C": 6}

HEAD = """// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \\file
/// Tables of Unicode {version} for unicode.hpp. make_unicode_tables.py writes this file: change the script
/// instead.

#include <array>
#include <cstdint>

namespace examples::detail {{

// clang-format off

/// Runs of code points of one class, each as first code point * 8 + class. A code point that nothing is
/// assigned to has the class of the one before it.
inline constexpr std::array<std::uint32_t, {runs}> unicode_class_runs{{{{
"""

MIDDLE = """}}}};

/// Code points first, first + stride .. last whose lower-case form is theirs + distance.
struct lower_case_run {{
  std::int32_t first, last, stride, distance;
}};

/// In order. U+0130 is not in it: its lower-case form has two code points.
inline constexpr std::array<lower_case_run, {runs}> lower_case_runs{{{{
"""

TAIL = """}};

// clang-format on

}  // namespace examples::detail
"""


def class_of(code):
    text = chr(code)
    if text.isspace():
        return CLASSES["space"]
    category = unicodedata.category(text)
    if category == "Cn":
        return None
    return CLASSES["space" if category[0] == "Z" else category[0]]


def class_runs():
    runs = []
    for code in range(LAST + 1):
        found = class_of(code)
        if found is not None and (not runs or runs[-1] % 8 != found):
            runs.append(code * 8 + found)
    return runs


def lower_case_runs():
    pairs = []
    for code in range(LAST + 1):
        lower = chr(code).lower()
        if len(lower) == 1 and ord(lower) != code:
            pairs.append((code, ord(lower) - code))
    runs, at = [], 0
    while at < len(pairs):
        ends = {}
        for stride in (1, 2):
            end = at
            while end + 1 < len(pairs) and pairs[end + 1] == (pairs[end][0] + stride, pairs[at][1]):
                end += 1
            ends[stride] = end
        stride = max(ends, key=lambda s: (ends[s], -s))
        runs.append((pairs[at][0], pairs[ends[stride]][0], stride, pairs[at][1]))
        at = ends[stride] + 1
    return runs


def lines(items, width=110):
    """Items joined by commas, in lines."""
    text, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > width:
            text.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join([*text, line]) + "\n"


def document():
    classes, lower = class_runs(), lower_case_runs()
    return (HEAD.format(version=VERSION, runs=len(classes)) + lines(f"{run:#x}" for run in classes)
            + MIDDLE.format(runs=len(lower)) + lines(f"{{{a:#x}, {b:#x}, {s}, {d}}}" for a, b, s, d in lower) + TAIL)


def main():
    if unicodedata.unidata_version != VERSION:
        sys.exit(f"this Python has Unicode {unicodedata.unidata_version}, not {VERSION}")
    text = document()
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if TARGET.read_text(encoding="utf-8") == text else f"{TARGET} is not what this script writes")
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
