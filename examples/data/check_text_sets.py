#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_text_sets.py FOLDER: are wikitext-2/ and multi30k/ below FOLDER what the examples expect? Each file may be plain
or in gzip. Compares SHA-256 of the unpacked text with that of the published files, and counts. Where they come from:
README.md beside this script."""
import gzip
import hashlib
import pathlib
import sys

# File: SHA-256 of the unpacked text, lines, words between spaces (None: not counted).
SETS = {
    "wikitext-2": {
        "wiki.train.tokens": ("9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", 36718, 2051910),
        "wiki.valid.tokens": ("f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", 3760, 213886),
        "wiki.test.tokens": ("d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", 4358, 241211),
    },
    "multi30k": {
        "train.de": ("2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72", 29000, None),
        "train.en": ("460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6", 29000, None),
        "val.de": ("660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660", 1014, None),
        "val.en": ("1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227", 1014, None),
        "test_2016_flickr.de": ("4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16", 1000, None),
        "test_2016_flickr.en": ("399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182", 1000, None),
    },
}


def read(path):
    """The text of a file or of its .gz; None if neither is there."""
    packed = path.with_name(path.name + ".gz")
    if path.is_file():
        return path.read_bytes()
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else None


def problems_of(path, digest, lines, words):
    text = read(path)
    if text is None:
        return [f"neither {path} nor {path.name}.gz exists"]
    found = []
    if text.count(b"\n") != lines:
        found.append(f"{path}: {text.count(bytes([10]))} lines, not {lines}")
    if words is not None and len(text.split()) != words:
        found.append(f"{path}: {len(text.split())} words, not {words}")
    if hashlib.sha256(text).hexdigest() != digest:
        found.append(f"{path}: not the published text: its SHA-256 is {hashlib.sha256(text).hexdigest()}")
    return found


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    problems = []
    for folder, files in SETS.items():
        found = [p for name, row in files.items() for p in problems_of(pathlib.Path(sys.argv[1]) / folder / name, *row)]
        print(f"{folder}: {'as published' if not found else f'{len(found)} problems'}")
        problems += found
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
