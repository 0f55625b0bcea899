#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""summary.py LOG...: sums Meson's testlog*.json files; prints `passed failed skipped`, then a line a failed test.

Tests that were stopped from outside, because the time was up, are none of the three."""
import json
import sys


def main():
    passed = skipped = 0
    failed = []
    for log in sys.argv[1:]:
        with open(log, encoding="utf-8") as file:
            for line in file:
                test = json.loads(line)
                if test["result"] in ("OK", "EXPECTEDFAIL"):
                    passed += 1
                elif test["result"] == "SKIP":
                    skipped += 1
                elif test["result"] != "INTERRUPT":
                    failed.append(f"{test['name']}: {test['result']}")
    print(passed, len(failed), skipped)
    print("\n".join(failed))


if __name__ == "__main__":
    main()
