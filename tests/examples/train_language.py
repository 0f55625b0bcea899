#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""train_language_model: learns a small text on one rank and on two, goes on bit for bit, writes text, refuses nonsense."""
import math
import signal

from support import digests, expect, expect_equal, load, main, write_text

SMALL = ["--width", 16, "--dropout", 0.1, "--lr", 5, "--batch", 8, "--segment", 15, "--eval-streams", 4, "--progress",
         "none", "--epochs", 3, "--warmup-epochs", 1]


def train(programs, folder, *arguments, ranks=0):
    target = folder / "result.json"
    target.unlink(missing_ok=True)
    output, _ = programs.run("train_language_model", "--data", write_text(folder), *SMALL, "--json", target, *arguments,
                             ranks=ranks)
    return load(target), output


def learns(programs, folder):
    for ranks in [n for n in programs.rank_counts() if n in (0, 2)]:
        one, _ = train(programs, folder, "--threads", 1, ranks=ranks)
        two, _ = train(programs, folder, "--threads", 2, ranks=ranks)
        expect_equal(digests(two), digests(one), f"parameters after each epoch, 2 threads, {ranks} ranks")
        expect([e["low_rank"] for e in one["history"]] == [False, True, True], "the switch is after epoch 1")
        expect_equal(len(one["switch"]["layers"]), 16, "matrices of two LSTM layers")
        expect(one["test_perplexity"] < 0.5 * one["vocabulary"], "better than drawing words")
        last = one["history"][-1]
        expect(abs(math.exp(last["test_loss"]) - last["valid_perplexity"]) < 1e-9, "perplexity is that of the loss")
        expect(one["after"]["parameters"] < one["before"]["parameters"], "factors are smaller")


def resume(programs, folder):
    whole, _ = train(programs, folder)
    for steps in (3, 100):
        file = folder / f"stop-{steps}.safetensors"
        programs.run("train_language_model", "--data", write_text(folder), *SMALL, "--checkpoint", file, "--stop-after", steps)
        again, _ = train(programs, folder, "--checkpoint", file, "--resume")
        expect_equal(digests(again), digests(whole), f"parameters after stopping at step {steps}")


def interrupted(programs, folder):
    file, result = folder / "signal.safetensors", folder / "signal.json"
    at = SMALL.index("--epochs")
    long = [*SMALL[:at], *SMALL[at + 2:], "--epochs", 1000, "--checkpoint", file, "--checkpoint-every", 2, "--json", result]
    status, output = programs.signalled("train_language_model", "--data", write_text(folder), *long, ready=file, number=signal.SIGTERM)
    expect_equal(status, 143, f"exit status after SIGTERM: {output}")
    told = load(result)
    expect_equal((told["interrupted"], told["finished"], told["test_perplexity"]), (True, False, None), "the JSON")
    programs.run("train_language_model", "--data", write_text(folder), *long, "--resume", "--stop-after", 1)
    expect_equal(load(result)["interrupted"], False, "the JSON of --stop-after")


def other_recipe(programs, folder):
    """Half a cosine: the rate falls within the last epoch too; low rank from random values."""
    result, _ = train(programs, folder, "--mode", "lowrank", "--schedule", "cosine")
    rates = [epoch["learning_rate"] for epoch in result["history"]]
    expect(0 < rates[2] < rates[1] < rates[0] < 5 and rates[2] < 0.05, f"rates that fall to zero: {rates}")
    expect("switch" not in result and result["test_perplexity"] < 0.5 * result["vocabulary"], "learns from random factors")


def factorized_embeddings(programs, folder):
    """Of V x 16, at the default ratio and at a given rank: at the switch, from random values, resumed, refused."""
    dense, _ = train(programs, folder)
    vocabulary = dense["vocabulary"]
    file = folder / "embedding.safetensors"
    for options, rank in [(["--factorize-embeddings"], 4), (["--embedding-rank", 6], 6)]:
        whole, output = train(programs, folder, *options)
        saved = 16 * vocabulary - rank * (16 + vocabulary)
        expect_equal(dense["after"]["parameters"] - whole["after"]["parameters"], saved, f"parameters saved by {options}")
        expect_equal(dense["after"]["bytes_per_step"] - whole["after"]["bytes_per_step"], 4 * saved, "bytes saved")
        names = [layer["name"].split(".")[0] for layer in whole["switch"]["layers"]]
        expect_equal(names.count("encoder"), 1, f"the embedding among {names}")
        expect("encoder" in output, "the embedding in the table of the switch")
        expect(whole["test_perplexity"] < 0.5 * vocabulary, "better than drawing words")
        low, _ = train(programs, folder, *options, "--mode", "lowrank")
        expect_equal(low["before"]["parameters"], whole["after"]["parameters"], "parameters from random values")
        expect(low["test_perplexity"] < 0.5 * vocabulary, "learns from random factors")
        file.unlink(missing_ok=True)
        steps = 2 * len(whole["history"])
        programs.run("train_language_model", "--data", write_text(folder), *SMALL, *options, "--checkpoint", file, "--stop-after",
                     steps)
        again, _ = train(programs, folder, *options, "--checkpoint", file, "--resume")
        expect_equal(digests(again), digests(whole), f"parameters after stopping at step {steps}")
    programs.run("train_language_model", "--data", write_text(folder), *SMALL, "--embedding-rank", 5, "--checkpoint", file,
                 "--resume", fails=True)
    for options, part in [(["--mode", "dense", "--factorize-embeddings"], "--factorize-embeddings has no effect with --mode dense"),
                          (["--mode", "dense", "--embedding-rank", 3], "--embedding-rank has no effect with --mode dense"),
                          (["--embedding-rank", 17], "rank 17 of a 16 x"), (["--embedding-rank", 16], "would need")]:
        _, error = programs.run("train_language_model", "--data", write_text(folder), *SMALL, *options, fails=True)
        expect(part in error and error.count("\n") == 1, f"one line about {part}: {error}")


def writes(programs, folder):
    arguments = ["--sample", 12, "--prompt", "the cat", "--temperature", 0]
    _, first = train(programs, folder, *arguments)
    _, second = train(programs, folder, *arguments)
    expect("the cat" in first and first.splitlines()[-1] == second.splitlines()[-1], "the likeliest words, twice the same")


def odd_texts(programs, folder):
    """One stream, segments of one token, lines without words, words that are unknown, texts that are too short."""
    tiny = ["--width", 8, "--epochs", 1, "--mode", "dense", "--progress", "none"]
    text = folder / "gaps.txt"
    text.write_text("the cat sees it .\n\n\n" * 40)
    programs.run("train_language_model", "--data", text, *tiny, "--batch", 1, "--segment", 1, "--eval-streams", 1)
    output, _ = programs.run("train_language_model", "--data", text, *tiny, "--batch", 2, "--sample", 2, "--prompt", "zebra")
    expect("<unk>" in output, "a word that the text does not have")
    for name, content, part in [("empty", "", "no tokens"), ("one", "word\n", "too short a text"),
                                ("short", "a b c\nd e f\n", "too short a text")]:
        short = folder / f"{name}.txt"
        short.write_text(content)
        _, error = programs.run("train_language_model", "--data", short, *tiny, "--batch", 1, fails=True)
        expect(part in error and f"{name}.txt" in error and error.count("\n") == 1, f"one line about {part}: {error}")


def refuses(programs, folder):
    text = write_text(folder)
    for arguments, part in [(["--data", folder / "nothing"], "nothing"), (["--data", text, "--batch", 100000], "streams"),
                            (["--data", text, "--epochs", 2, "--warmup-epochs", 2], "warm-up")]:
        _, error = programs.run("train_language_model", "--width", 8, *arguments, fails=True)
        expect(part in error and error.count("\n") == 1, f"one line about {part}: {error}")


def test(programs, folder):
    learns(programs, folder)
    resume(programs, folder)
    interrupted(programs, folder)
    other_recipe(programs, folder)
    factorized_embeddings(programs, folder)
    writes(programs, folder)
    odd_texts(programs, folder)
    refuses(programs, folder)


main(test)
