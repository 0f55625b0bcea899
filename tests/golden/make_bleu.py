#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""make_bleu.py [--cases N] FILE: what sacreBLEU 2.6.0 (pip install sacrebleu==2.6.0) says about segments that try the
rules of its defaults; tests/unit/examples/text/bleu.cpp compares examples/text/bleu.hpp with tests/golden/bleu.json. More
cases: --cases 2000 and PUFFERFISH_BLEU_GOLDEN=FILE for the test."""
import argparse
import json
import random

import sacrebleu
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

VERSION = "2.6.0"
WORDS = ["the", "The", "cat", "Katze", "dog", "runs", "Äpfel", "Σας", "ΟΔΟΣ", "İstanbul", "l'eau", "3.5", "1,000", "2-3",
         "-", "--", ".", ",", "...", "!", "?", "(x)", "a/b", "&amp;", "&quot;", "&lt;b&gt;", "<skipped>", "U.S.", "5.",
         ".5", "x.y", "$4", "50%", "it's", "'", "\"", "@-@", "中文", "😀", "co-op", "A&B", "[1]", "{}", "~", "^", "`", "_",
         "1.", "1.,2", "9-", "-9", "a-1", "1-a", ",,", "\u00a0", "\u2028", "\t", "\u3000x", "-\n", "\n", "\x1f", "*", "+"]
FIXED = [
    ([], []),
    (["the cat is on the mat"], ["the cat is on the mat"]),
    (["the the the the the the the"], ["the cat is on the mat"]),
    (["a b", "c"], ["x y", "z"]),
    (["", "a b c d e"], ["a b", "a b c d e"]),
    (["", ""], ["a", "b"]),
    (["a b c", "d"], ["", "d"]),
    (["Hello, World! 3.5% of $1,000."], ["hello , world ! 3.5 % of $ 1,000 ."]),
    (["word ", "word-\n"], ["word", "word-"]),
    (["a b c"], ["a b c d"]),
]


def segment(rng, like=None):
    words = list(like) if like else [rng.choice(WORDS) for _ in range(rng.randrange(12))]
    for _ in range(rng.randrange(4) if like else 0):
        at = rng.randrange(len(words) + 1)
        words[at:at + rng.randrange(2)] = [rng.choice(WORDS)] if rng.random() < 0.6 else []
    return words


def text(rng, words):
    return "".join(word + rng.choice([" ", " ", " ", "", "  "]) for word in words)


def corpora(cases):
    yield from FIXED
    rng = random.Random(7)
    for _ in range(cases):
        outputs, references = [], []
        for _ in range(rng.randrange(1, 6)):
            words = segment(rng)
            outputs.append(text(rng, words))
            references.append(text(rng, segment(rng, words)))
        yield outputs, references


def case(index, outputs, references):
    lowercase = index % 3 == 0
    metric = BLEU(lowercase=lowercase)
    if outputs:
        score = metric.corpus_score(outputs, [references])
        signature = str(metric.get_signature()).rsplit("|version:", 1)[0]
    else:
        score, signature = metric.compute_bleu([0] * 4, [0] * 4, 0, 0), ""
    return {"lowercase": lowercase, "outputs": outputs, "references": references, "signature": signature,
            "score": score.score, "precisions": score.precisions, "counts": score.counts, "totals": score.totals,
            "bp": score.bp, "sys_len": score.sys_len, "ref_len": score.ref_len,
            "text": score.format().split(" = ", 1)[1]}


def tokens(cases):
    rng = random.Random(8)
    tokenizer = Tokenizer13a()
    lines = [text(rng, segment(rng)) for _ in range(cases)] + ["".join(chr(c) for c in range(32, 127)), "", " ", "."]
    return [[line, tokenizer(line)] for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("file")
    arguments = parser.parse_args()
    if sacrebleu.__version__ != VERSION:
        raise SystemExit(f"sacrebleu {sacrebleu.__version__} is not {VERSION}")
    document = {"sacrebleu": VERSION, "tokens_13a": tokens(arguments.cases),
                "corpora": [case(i, *c) for i, c in enumerate(corpora(arguments.cases))]}
    with open(arguments.file, "w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=True, indent=None, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
