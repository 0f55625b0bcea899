#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""peer_images.py --data DIR [--size N] [--runs N]

The peer of bench_images: what torchvision's RandomResizedCrop, CenterCrop, ToTensor and Normalize do to a JPEG file, by the
calls of Pillow and NumPy that they make, one image after another in one thread, without PyTorch around it. Prints a JSON
object a line.
"""
import argparse
import json
import math
import pathlib
import random
import statistics
import time

import numpy
import PIL
from PIL import Image

MEAN = numpy.array([0.485, 0.456, 0.406], numpy.float32)
DEVIATION = numpy.array([0.229, 0.224, 0.225], numpy.float32)


def random_window(width, height, draw):
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def random_image(path, size, draw):
    with Image.open(path) as image:
        photo = image.convert("RGB")
    photo = photo.crop(random_window(*photo.size, draw)).resize((size, size), Image.BILINEAR)
    return photo.transpose(Image.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else photo


def middle_image(path, size, _):
    with Image.open(path) as image:
        photo = image.convert("RGB")
    factor = size * 8 // 7 / min(photo.size)
    photo = photo.resize((round(photo.width * factor), round(photo.height * factor)), Image.BILINEAR)
    left, top = (photo.width - size) // 2, (photo.height - size) // 2
    return photo.crop((left, top, left + size, top + size))


def rate(paths, read, size, runs):
    draw, found = random.Random(1), []
    batch = numpy.empty((64, size, size, 3), numpy.float32)
    for run in range(runs + 1):
        begin = time.perf_counter()
        for i, path in enumerate(paths):
            batch[i % 64] = (numpy.asarray(read(path, size, draw), numpy.float32) / 255 - MEAN) / DEVIATION
        if run:  # run 0 warms up
            found.append(len(paths) / (time.perf_counter() - begin))
    return sorted(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--runs", type=int, default=5)
    a = parser.parse_args()
    paths = sorted(a.data.glob("*/*.jpg"))
    for window, read in (("random", random_image), ("middle", middle_image)):
        found = rate(paths, read, a.size, a.runs)
        print(json.dumps({"window": window, "threads": 1, "images": len(paths), "pillow": PIL.__version__,
                          "images_per_s": statistics.median(found), "least": found[0], "most": found[-1]}), flush=True)


if __name__ == "__main__":
    main()
