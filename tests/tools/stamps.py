#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Remembers which checks have passed, for checks that depend on nothing but a text: `key(text, ...)` names the check,
`passed(key)` says whether it has passed before, `leave(key)` remembers that it has.

Stamps are empty files in a folder of ccache's cache: who keeps or clears the one keeps or clears the other. Without
ccache nothing is remembered.
"""
import functools
import hashlib
import pathlib
import subprocess
import time

DAYS = 60  # a stamp that has not been asked for this long is removed


@functools.cache
def folder():
    try:
        done = subprocess.run(["ccache", "--get-config", "cache_dir"], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not done.stdout.strip():
            return None
        found = pathlib.Path(done.stdout.strip()) / "pufferfish-stamps"
        found.mkdir(parents=True, exist_ok=True)
        for stamp in found.iterdir():
            if time.time() - stamp.stat().st_mtime > DAYS * 86400:
                stamp.unlink(missing_ok=True)
    except OSError:  # no ccache, or nothing may be written there
        return None
    return found


def key(*texts):
    value = hashlib.sha256()
    for text in texts:
        value.update(f"{len(text)} {text}".encode())
    return value.hexdigest()


def passed(name):
    if folder() is None or not (folder() / name).exists():
        return False
    (folder() / name).touch()
    return True


def leave(name):
    if folder() is not None:
        (folder() / name).touch()
