#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""train_translator: learns a toy language on one rank and on two, goes on bit for bit, refuses nonsense."""
import signal

from support import digests, expect, expect_equal, load, main, write_translations

SMALL = ["--width", 16, "--hidden", 32, "--layers", 2, "--heads", 2, "--batch", 32, "--epochs", 3, "--warmup-epochs", 1,
         "--noam-warmup", 30, "--min-count", 1, "--bucket-batches", 4, "--beam", 2, "--show", 1, "--progress", "none"]
NOUNS = [("hund", "dog"), ("katze", "cat"), ("vogel", "bird"), ("haus", "house")]
VERBS = [("sieht", "sees"), ("mag", "likes"), ("sucht", "seeks")]


def write_pairs(folder):
    data = folder / "multi30k"
    if not data.exists():
        parts = {}
        for part, count, shift in [("train", 300, 0), ("val", 20, 3), ("test_2016_flickr", 20, 5)]:
            words = [(NOUNS[(i + shift) % 4], VERBS[i % 3], NOUNS[(i // 4 + i % 5) % 4]) for i in range(count)]
            parts[part] = [tuple(f"{a[side]} {v[side]} {b[side]} ." for side in (0, 1)) for a, v, b in words]
        write_translations(data, parts)
    return folder


def train(programs, folder, *arguments, ranks=0):
    target = folder / "result.json"
    target.unlink(missing_ok=True)
    programs.run("train_translator", "--data", write_pairs(folder), *SMALL, "--json", target, *arguments, ranks=ranks)
    return load(target)


def learns(programs, folder):
    for ranks in [n for n in programs.rank_counts() if n in (0, 2)]:
        one = train(programs, folder, "--threads", 1, ranks=ranks)
        two = train(programs, folder, "--threads", 2, ranks=ranks)
        expect_equal(digests(two), digests(one), f"parameters after each epoch, 2 threads, {ranks} ranks")
        expect([e["low_rank"] for e in one["history"]] == [False, True, True], "the switch is after epoch 1")
        # The second layer of each stack: four projections and two feed-forward matrices, and four more across.
        expect_equal(len(one["switch"]["layers"]), 16, "factorized matrices")
        expect(one["history"][-1]["test_loss"] < one["history"][0]["test_loss"], "the loss falls")
        expect(0 <= one["bleu"] <= 100, "BLEU in percent")


def resume(programs, folder):
    whole = train(programs, folder)
    for steps in (4, 17):
        file = folder / f"stop-{steps}.safetensors"
        programs.run("train_translator", "--data", write_pairs(folder), *SMALL, "--checkpoint", file, "--stop-after", steps)
        again = train(programs, folder, "--checkpoint", file, "--resume")
        expect_equal(digests(again), digests(whole), f"parameters after stopping at step {steps}")
        expect_equal(again["bleu"], whole["bleu"], "BLEU")


def interrupted(programs, folder):
    file, result = folder / "signal.safetensors", folder / "signal.json"
    at = SMALL.index("--epochs")
    long = [*SMALL[:at], *SMALL[at + 2:], "--epochs", 1000, "--checkpoint", file, "--checkpoint-every", 2, "--json", result]
    status, output = programs.signalled("train_translator", "--data", write_pairs(folder), *long, ready=file, number=signal.SIGTERM)
    expect_equal(status, 143, f"exit status after SIGTERM: {output}")
    told = load(result)
    expect_equal((told["interrupted"], told["finished"], told["bleu"]), (True, False, None), "the JSON")
    programs.run("train_translator", "--data", write_pairs(folder), *long, "--resume", "--stop-after", 1)
    expect_equal(load(result)["interrupted"], False, "the JSON of --stop-after")


def other_recipe(programs, folder):
    """Half a cosine; low rank from random values, all layers of both stacks."""
    pure = train(programs, folder, "--mode", "lowrank", "--dense-layers", 0, "--schedule", "cosine", "--lr", 0.003)
    rates = [epoch["learning_rate"] for epoch in pure["history"]]
    expect(0 < rates[2] < rates[1] < 0.003, f"rates that fall to zero: {rates}")
    expect("switch" not in pure and pure["history"][2]["test_loss"] < pure["history"][0]["test_loss"], "the loss falls")


def factorized_embeddings(programs, folder):
    """The table that both stacks and the output share, of V x 16: at the switch, from random values, refused."""
    dense = train(programs, folder)
    table = dense["before"]["parameters"]
    for options, rank in [(["--factorize-embeddings"], 4), (["--embedding-rank", 5], 5)]:
        one = train(programs, folder, *options)
        found = [layer for layer in one["switch"]["layers"] if layer["name"].startswith("encoder.src_word_emb")]
        expect_equal([layer["rank"] for layer in found], [rank], "rank of the embedding")
        saved = found[0]["parameters_before"] - found[0]["parameters_after"]
        expect(saved > 0 and found[0]["parameters_before"] < table, f"factors are smaller: {found}")
        expect_equal(dense["after"]["parameters"] - one["after"]["parameters"], saved, f"parameters saved by {options}")
        expect(one["history"][-1]["test_loss"] < one["history"][0]["test_loss"], "the loss falls")
    low = train(programs, folder, "--mode", "lowrank", "--embedding-rank", 5)
    expect_equal(low["before"]["parameters"], one["after"]["parameters"], "parameters from random values")
    _, error = programs.run("train_translator", "--data", write_pairs(folder), *SMALL, "--mode", "dense", "--embedding-rank", 5,
                            fails=True)
    expect("--embedding-rank has no effect with --mode dense" in error and error.count("\n") == 1, f"one line: {error}")


def odd_sentences(programs, folder):
    """Batches of one; sentences that are empty or too long: not trained on, but translated."""
    good = [("der hund sieht es .", "the dog sees it .")] * 5
    odd = [("", ""), ("hund", ""), ("hund " * 30, "dog")]
    tiny = ["--width", 8, "--hidden", 8, "--layers", 1, "--heads", 2, "--epochs", 1, "--mode", "dense", "--min-count", 1,
            "--max-length", 20, "--noam-warmup", 5, "--beam", 2, "--progress", "none"]
    write_translations(folder / "odd", {"train": good + odd, "val": good + odd, "test": odd + good})
    for batch in (1, 4):
        target = folder / "odd.json"
        programs.run("train_translator", "--data", folder / "odd", *tiny, "--batch", batch, "--json", target)
        expect(0 <= load(target)["bleu"] <= 100, "BLEU in percent")
    for name, pairs, part in [("empty", [], "no sentence pairs"), ("unfit", odd, "no sentence pairs"),
                              ("uneven", good, "do not belong together")]:
        write_translations(folder / name, {"train": pairs, "val": good, "test": good})
        if name == "uneven":
            (folder / name / "train.de").write_text("hund\n" * 9)
        _, error = programs.run("train_translator", "--data", folder / name, *tiny, fails=True)
        expect(part in error and name in error and error.count("\n") == 1, f"one line about {part}: {error}")


def refuses(programs, folder):
    data = write_pairs(folder)
    for arguments, part in [(["--data", folder / "nothing"], "nothing"),
                            (["--data", data, "--width", 16, "--heads", 3, "--min-count", 1], "heads"),
                            (["--data", data, "--max-length", 191], "191 not in range"),
                            (["--data", data, "--epochs", 2, "--warmup-epochs", 2, "--min-count", 1], "warm-up")]:
        _, error = programs.run("train_translator", *arguments, fails=True)
        expect(part in error and error.count("\n") == 1, f"one line about {part}: {error}")


def test(programs, folder):
    learns(programs, folder)
    resume(programs, folder)
    interrupted(programs, folder)
    other_recipe(programs, folder)
    factorized_embeddings(programs, folder)
    odd_sentences(programs, folder)
    refuses(programs, folder)


main(test)
