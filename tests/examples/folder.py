#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""train_image_classifier on a folder of JPEG files: it learns, in one rank and several, resumes, and names bad files."""
import base64

from support import digests, expect, expect_equal, load, main

RED = base64.b64decode(  # 20 x 16 pixels, darker on the left
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYV"
    "pQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAQ"
    "ABQDASIAAhEBAxEB/8QAFwABAQEBAAAAAAAAAAAAAAAAAAUDBv/EABkQAQACAwAAAAAAAAAAAAAAAAACBDSBsf/EABYBAQEBAAAAAAAAAAAAAA"
    "AAAAQDBv/EABoRAQABBQAAAAAAAAAAAAAAAAABAwQxMnH/2gAMAwEAAhEDEQA/AOLVKWLDfUtUpYsN9CqYaC13njcBI5//2Q==")
BLUE = base64.b64decode(  # 18 x 18 pixels, likewise
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYV"
    "pQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAS"
    "ABIDASIAAhEBAxEB/8QAFwABAQEBAAAAAAAAAAAAAAAAAAUCBv/EABkQAQACAwAAAAAAAAAAAAAAAAABAgMzcv/EABYBAQEBAAAAAAAAAAAAAA"
    "AAAAQCBv/EABgRAQADAQAAAAAAAAAAAAAAAAABAgQx/9oADAMBAAIRAxEAPwDg1HFqpzCco4tVOYaLL2RbtAGoTFHFqpzABZeyu7QBqH//2Q==")


def fill(data):
    for part, count in (("train", 12), ("val", 3)):
        for name, picture in (("blue", BLUE), ("red", RED)):
            (data / part / name).mkdir(parents=True)
            for i in range(count):
                (data / part / name / f"{i}.jpg").write_bytes(picture)


def test(programs, folder):
    data, target = folder / "pictures", folder / "result.json"
    fill(data)
    options = ["--dataset", "folder", "--data", data, "--image-size", 12, "--image-resize", 14, "--width", 8,
               "--batch", 8, "--progress", "none", "--epochs", 6, "--warmup-epochs", 3, "--lr", 0.05,
               "--decode-threads", 2, "--json", target]

    def train(*more, ranks=0):
        target.unlink(missing_ok=True)
        out, _ = programs.run("train_image_classifier", *options, *more, ranks=ranks)
        return load(target), out

    alone, _ = train()
    expect_equal(alone["accuracy"], 100, "accuracy")
    expect("top5_accuracy" not in alone, "two classes have no top-5 accuracy")
    expect_equal(alone["options"]["smallest_area"], 0.08, "the usual windows")
    middle, _ = train("--smallest-area", 1)
    expect(digests(middle) != digests(alone), "windows change the training")
    checkpoint = folder / "run.safetensors"
    train("--checkpoint", checkpoint)
    resumed, _ = train("--checkpoint", checkpoint, "--resume")
    expect_equal(digests(resumed), digests(alone), "a run from its checkpoint")
    for ranks in programs.rank_counts()[2:]:
        many, _ = train(ranks=ranks)
        expect_equal((many["finished"], many["options"]["ranks"], len(many["history"])), (True, ranks, 6), "many ranks")
    (data / "train" / "red" / "5.jpg").write_bytes(RED[:40])
    for ranks in programs.rank_counts()[:3]:
        _, errors = programs.run("train_image_classifier", *options, ranks=ranks, fails=True)
        expect("red/5.jpg: " in errors, f"the bad file is named:\n{errors}")
    _, errors = programs.run("train_image_classifier", "--image-size", 12, fails=True)
    expect("--image-size: has no effect with --dataset digits" in errors, errors)
    (data / "val" / "green").mkdir()
    (data / "val" / "green" / "1.jpg").write_bytes(RED)
    _, errors = programs.run("train_image_classifier", *options, fails=True)
    expect("train has 2 classes, val 3" in errors, errors)


if __name__ == "__main__":
    main(test)
