#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""make_digits.py digits.csv.gz FOLDER          writes the bundled digits set to FOLDER
make_digits.py --check digits.csv.gz FOLDER  compares FOLDER's files with what would be written

digits.csv.gz (scikit-learn's datasets/data) holds one image a line: 64 values 0..16 and the digit. The split is fixed:
36 images of each class go to the test set, chosen by a generator written out below, since no library promises equal
random numbers for ever. Both sets keep the order of the source. The files are gzip IDX under MNIST's names.
"""
import argparse
import gzip
import hashlib
import pathlib
import struct
import sys
import zlib

SEED = 1998
TEST_PER_CLASS = 36
CLASSES = 10
SIDE = 8
MAX_VALUE = 16
SOURCE_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


class SplitMix64:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        x = self.state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    def below(self, bound):
        return self.next() * bound >> 64

    def shuffle(self, items):
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


def read_source(path):
    text = gzip.decompress(path.read_bytes())
    digest = hashlib.sha256(text).hexdigest()
    if digest != SOURCE_SHA256:
        sys.exit(f"{path}: SHA-256 of the unpacked text is {digest}, expected {SOURCE_SHA256}")
    rows = []
    for number, line in enumerate(text.decode("ascii").splitlines(), 1):
        values = [int(v) for v in line.split(",")]
        if len(values) != SIDE * SIDE + 1 or not all(0 <= v <= MAX_VALUE for v in values) or values[-1] >= CLASSES:
            sys.exit(f"{path}: line {number} is not 64 values in 0..16 and a digit")
        rows.append((bytes(values[:-1]), values[-1]))
    return rows


def split(rows):
    generator = SplitMix64(SEED)
    test = set()
    for label in range(CLASSES):
        members = [i for i, row in enumerate(rows) if row[1] == label]
        generator.shuffle(members)
        test.update(members[:TEST_PER_CLASS])
    return {"train": [r for i, r in enumerate(rows) if i not in test],
            "t10k": [r for i, r in enumerate(rows) if i in test]}


def pack(data):
    """One gzip member without name and time. The module gzip writes headers that differ between Python versions."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    header = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"
    return header + deflate.compress(data) + deflate.flush() + struct.pack("<II", zlib.crc32(data), len(data))


def idx_files(rows):
    files = {}
    for name, part in split(rows).items():
        images = struct.pack(">BBBB3I", 0, 0, 8, 3, len(part), SIDE, SIDE) + b"".join(r[0] for r in part)
        labels = struct.pack(">BBBBI", 0, 0, 8, 1, len(part)) + bytes(r[1] for r in part)
        files[f"{name}-images-idx3-ubyte"] = images
        files[f"{name}-labels-idx1-ubyte"] = labels
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    wrong = 0
    for name, data in sorted(idx_files(read_source(options.source)).items()):
        path = options.folder / (name + ".gz")
        if not options.check:
            path.write_bytes(pack(data))
        stored = path.read_bytes()
        content = gzip.decompress(stored)
        state = "equal" if stored == pack(data) else "equal content, compressed by another zlib"
        if content != data:
            state = "DIFFERENT"
            wrong += 1
        print(f"{hashlib.sha256(stored).hexdigest()}  {path.name}")
        print(f"{hashlib.sha256(content).hexdigest()}  {name}  ({state})")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
