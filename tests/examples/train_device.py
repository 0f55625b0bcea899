#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The training programs with --device gpu, on the emulated device: the losses of the CPU, in bf16 too; the same bits when
stopped and gone on with; two ranks."""
import gzip

from support import TEST_IMAGES, TEST_LABELS, digests, expect, expect_equal, load, main, write_text, write_translations

EPOCHS = ["--epochs", 2, "--warmup-epochs", 1, "--progress", "none"]


def write_images(folder):
    """The first few digits, as MNIST's files."""
    data = folder / "mnist"
    data.mkdir()
    for name, header in [(TEST_IMAGES, 16), (TEST_LABELS, 8)]:
        whole = gzip.decompress(name.read_bytes())
        size = (len(whole) - header) // int.from_bytes(whole[4:8], "big")
        kind = name.name.split("-", 1)[1].removesuffix(".gz")
        for part, first, count in [("train", 0, 40), ("t10k", 40, 12)]:
            chosen = whole[header + first * size : header + (first + count) * size]
            (data / f"{part}-{kind}").write_bytes(whole[:4] + count.to_bytes(4, "big") + whole[8:header] + chosen)
    return data


def write_pairs(folder):
    words = [("hund", "dog"), ("katze", "cat"), ("vogel", "bird")]
    sentences = [[words[(i * i + k) % 3] for k in range(1 + i % 4)] for i in range(40)]
    lines = [tuple(" ".join(word[side] for word in sentence) for side in (0, 1)) for sentence in sentences]
    write_translations(folder / "multi30k", {"train": lines, "val": lines[:6], "test_2016_flickr": lines[6:10]})
    return folder


def programs_of(folder):
    return {
        "train_image_classifier": ["--dataset", "mnist", "--data", write_images(folder), "--width", 4, "--batch", 16,
                                   "--flip", "--pad-crop", 1],
        "train_language_model": ["--data", write_text(folder, 80), "--width", 8, "--batch", 4, "--segment", 9, "--lr", 2,
                                 "--eval-streams", 2, "--sample", 3],
        "train_translator": ["--data", write_pairs(folder), "--width", 8, "--hidden", 8, "--layers", 1, "--heads", 2,
                             "--dense-layers", 0, "--batch", 8, "--noam-warmup", 8, "--min-count", 1, "--beam", 2],
    }


def losses(result):
    return [epoch[which] for epoch in result["history"] for which in ("train_loss", "test_loss")]


def distance(result, expected):
    return max(abs(a - b) / b for a, b in zip(losses(result), losses(expected)))


def test(programs, folder):
    target = folder / "result.json"
    for name, arguments in programs_of(folder).items():
        def run(*more, ranks=0, name=name, arguments=arguments):
            target.unlink(missing_ok=True)
            programs.run(name, *arguments, *EPOCHS, "--json", target, *more, ranks=ranks)
            return load(target)

        # Without statistics the device decomposes the weights itself; with them, as below, the host does.
        plain = ("--policy", "paper")
        expect(distance(run("--device", "gpu", *plain), run(*plain)) < 1e-4, f"{name}: the paper's switch")
        on_cpu = run()
        for precision, tolerance in [("fp32", 1e-4), ("bf16", 0.1)]:
            device = ["--device", "gpu", "--precision", precision]
            whole = run(*device)
            expect_equal(whole["options"]["precision"], precision, f"{name}: what was asked for")
            expect(distance(whole, on_cpu) < tolerance, f"{name}, {precision}: {losses(whole)}, on the CPU {losses(on_cpu)}")
            expect_equal(whole["after"], on_cpu["after"], f"{name}, {precision}: costs after the switch")
            if precision == "fp32":
                file = folder / f"{name}.safetensors"
                programs.run(name, *arguments, *EPOCHS, *device, "--checkpoint", file, "--stop-after", 2)
                again = run(*device, "--checkpoint", file, "--resume")
                expect_equal(digests(again), digests(whole), f"{name}: parameters after stopping")
        if programs.mpirun:
            expect(distance(run("--device", "gpu", ranks=2), run(ranks=2)) < 1e-4, f"{name}: two ranks")


main(test)
