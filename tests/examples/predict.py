#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""predict: dense, hybrid and merged networks, on an IDX file, single pictures and a CIFAR-10 batch."""
import gzip

from support import TEST_IMAGES, TEST_LABELS, expect, expect_equal, idx_images, load, main

CIFAR_RECORD = 3073


def classify(programs, folder, model, *arguments):
    target = folder / "prediction.json"
    programs.run("predict", "--model", model, "--json", target, *arguments)
    return load(target)


def distance(one, other):
    pairs = zip(one["files"][0]["images"], other["files"][0]["images"])
    return max(abs(p - q) for a, b in pairs for p, q in zip(a["probabilities"], b["probabilities"]))


def digits(programs, folder):
    results, trained = {}, {}
    for kind in ("dense", "hybrid", "merged"):
        model = folder / f"{kind}.safetensors"
        mode = ["--mode", "dense"] if kind == "dense" else ["--warmup-epochs", 2]
        extra = ["--merge"] if kind == "merged" else []
        trained[kind] = programs.train(folder, "--epochs", 4, *mode, "--save", model, *extra)
        result = classify(programs, folder, model, TEST_IMAGES, "--labels", TEST_LABELS)
        expect_equal(result["files"][0]["count"], 360, "images")
        expect(abs(result["files"][0]["accuracy"] - trained[kind]["accuracy"]) < 1e-9, f"{kind}: accuracy of training")
        sums = [sum(image["probabilities"]) for image in result["files"][0]["images"]]
        expect(all(abs(s - 1) < 1e-9 for s in sums), "probabilities add up to 1")
        results[kind] = result
    expect(results["hybrid"]["low_rank_layers"] > 0 and results["merged"]["low_rank_layers"] == 0, "merged is dense")
    expect_equal(results["merged"]["parameters"], results["dense"]["parameters"], "parameters of merged and dense")
    expect(distance(results["hybrid"], results["merged"]) < 1e-4, "hybrid and merged agree")
    expect(distance(results["hybrid"], results["dense"]) > 1e-4, "hybrid and dense are two networks")
    return results["hybrid"]


def pictures(programs, folder, whole):
    """A digit as a picture, in the range of the file and in that of common pictures, is the digit of the set."""
    model = folder / "hybrid.safetensors"
    image = idx_images()[5]
    files = []
    for maximum in (16, 240):
        pixels = bytes(v * maximum // 16 for v in image)
        files.append(folder / f"digit{maximum}.pgm")
        files[-1].write_bytes(b"P5\n# a comment\n8 8\n%d\n" % maximum + pixels)
    packed = folder / "digit.pgm.gz"
    packed.write_bytes(gzip.compress(files[0].read_bytes()))
    result = classify(programs, folder, model, *files, packed)
    want = whole["files"][0]["images"][5]
    for entry in result["files"]:
        have = entry["images"][0]
        expect_equal(have["class"], want["class"], entry["file"])
        expect(max(abs(p - q) for p, q in zip(have["probabilities"], want["probabilities"])) < 1e-6, "probabilities")
    out, _ = programs.run("predict", "--model", model, files[0], "--top", 2)
    expect_equal(len(out.split()), 5, f"file name, two classes and probabilities in {out!r}")


def cifar(programs, folder):
    """A set in the layout of CIFAR-10, of three colours that can be told apart."""
    data = folder / "cifar10"
    data.mkdir()
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]

    def batch(count, shift):
        labels = [(n + shift) % 3 for n in range(count)]
        planes = [b"".join(bytes([c + n % 20]) * 1024 for c in colours[label]) for n, label in enumerate(labels)]
        return b"".join(bytes([label]) + planes[n] for n, label in enumerate(labels))

    for n in range(1, 6):
        (data / f"data_batch_{n}.bin").write_bytes(batch(12, n))
    (data / "test_batch.bin").write_bytes(batch(9, 0))
    model = folder / "cifar.safetensors"
    trained = programs.train(folder, "--dataset", "cifar10", "--data", folder, "--epochs", 4, "--warmup-epochs", 2,
                             "--save", model, "--stem-stride", 4)
    result = classify(programs, folder, model, data / "test_batch.bin")
    expect_equal(result["files"][0]["count"], 9, "images")
    expect_equal(result["files"][0]["accuracy"], trained["accuracy"], "accuracy of the batch")
    expect_equal(result["classes"][0], "airplane", "class names")
    picture = folder / "colour.ppm"
    record = (data / "test_batch.bin").read_bytes()[1:CIFAR_RECORD]
    picture.write_bytes(b"P6 32 32 255\n" + bytes(record[c * 1024 + i] for i in range(1024) for c in range(3)))
    one = classify(programs, folder, model, picture)["files"][0]["images"][0]["probabilities"]
    want = result["files"][0]["images"][0]["probabilities"]
    expect(max(abs(p - q) for p, q in zip(one, want)) < 1e-6, "a PPM picture is the record's image")


def test(programs, folder):
    pictures(programs, folder, digits(programs, folder))
    cifar(programs, folder)


main(test)
