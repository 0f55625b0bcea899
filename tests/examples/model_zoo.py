#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""model_zoo's counts are those of tests/golden/zoo.json, to the last parameter, and its layers add up to them."""
import ast
import json
import operator
import pathlib
import re

from support import expect, expect_equal, load, main

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "zoo.json"
PAGE = ROOT / "docs" / "models.md"
COUNTS = ["parameters", "buffers", "macs", "macs_paper"]
OPERATIONS = {ast.Mult: operator.mul, ast.Sub: operator.sub}


def value_of(arithmetic):
    """What a product of whole numbers and differences of such products comes to."""
    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        return node.value
    return value(ast.parse(arithmetic, mode="eval").body)


def check_golden(golden):
    """The file itself: what our strided shortcuts save is worked out right, and is all that differs."""
    for row in golden:
        saved = 0
        for layer in row.get("saved", []):
            expect_equal(value_of(layer["arithmetic"]), layer["macs"], f"{row['model']} {layer['layer']}")
            saved += layer["macs"]
        if "reference_macs" in row:
            expect_equal(row["macs"], row["reference_macs"] - saved, f"{row['model']} {row['mode']}: MACs")
            expect_equal(row["macs_paper"], row["reference_macs_paper"] - saved, f"{row['model']} {row['mode']}: MACs")


def check_counts(rows, golden):
    key = lambda row: (row["model"], row["mode"])
    expect_equal([key(row) for row in rows], [key(row) for row in golden], "models and modes")
    counted = {}
    for row, want in zip(rows, golden):
        for count in COUNTS:
            expect_equal(row[count], want[count], f"{key(row)} {count}")
        for count in ["parameters", "macs"]:
            expect_equal(sum(layer[count] for layer in row["layers"]), row[count], f"{key(row)}: {count} of its layers")
        ranks = [layer["rank"] for layer in row["layers"]]
        expect(any(ranks) == (row["mode"] != "dense"), f"{key(row)}: ranks {ranks}")
        # A layer whose stride our form of the shortcut moves is at the rank that the arithmetic says.
        for saved in want.get("saved", []):
            layer = next(l for l in row["layers"] if l["name"] == saved["layer"])
            expect_equal(layer["rank"], int(saved["arithmetic"].split()[0]), f"{key(row)} {saved['layer']}: rank")
        # The numbers of the layers count up, and no switch shifts them.
        numbers = [layer["number"] for layer in row["layers"] if layer["number"]]
        expect_equal(numbers, list(range(1, len(numbers) + 1)), f"{key(row)}: numbers of its layers")
        if row["mode"] != "lowrank":  # some are networks of another kind, with a batch norm between the factors
            expect_equal(len(numbers), counted.setdefault(row["model"], len(numbers)), f"{key(row)}: how many have one")


def check_page(golden):
    """docs/models.md has the same table."""
    text = PAGE.read_text(encoding="utf-8")
    for row in golden:
        star = r"\*" if "saved" in row else ""
        cells = [f"{row[c]:,}" for c in ("parameters", "buffers", "macs", "macs_paper")]
        expect(re.search(rf"^\| {row['model']} \| {row['mode']} \| [^|]+ \| {cells[0]} \| [^|]+ \| {cells[1]} \| "
                         rf"{cells[2]}{star} \| {cells[3]}{star} \|", text, re.MULTILINE),
               f"{PAGE.name}: {row['model']} {row['mode']} is not there with {cells}")


def test(programs, folder):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["models"]
    check_golden(golden)
    check_page(golden)
    out, table = programs.run("model_zoo", "--json", "-")
    rows = json.loads(out)
    check_counts(rows, golden)
    # The table has the same, in groups of three digits.
    for row in rows:
        line = re.search(rf"^{row['model']} +{row['mode']} .*$", table, re.MULTILINE)
        expect(line and f"{row['parameters']:,}" in line[0] and f"{row['macs']:,}" in line[0], f"{row['model']} in\n{table}")

    target = folder / "zoo.json"
    table, _ = programs.run("model_zoo", "--model", "resnet18_cifar", "--layers", "--json", target)
    expect_equal(load(target), [row for row in rows if row["model"] == "resnet18_cifar"], "one model's JSON")
    expect(re.search(r"^layer4\.1\.conv2 +17 +128 +655,360 +10,485,760$", table, re.MULTILINE), f"a factorized layer in\n{table}")
    expect(re.search(r"^layer4\.0\.shortcut\.0 +131,072 +2,097,152$", table, re.MULTILINE), f"a shortcut without a number in\n{table}")
    for arguments in (["--model", "resnet"], ["--json", "/nowhere/x.json"]):
        _, err = programs.run("model_zoo", *arguments, fails=True)
        expect(err.startswith("model_zoo: ") and len(err.splitlines()) == 1, f"one line, not\n{err}")


main(test)
