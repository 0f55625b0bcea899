# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Records of measurements, as docs/results keeps them: medians and spreads instead of samples, seven digits of a number, one line
for each epoch, layer or case.

The training programs write more. of_training removes the fields that no page, plot or check reads, and of_series joins
predictions; text and lines write the files. Pages accept the results of the programs, too: the remaining fields have the same
names and places.
"""
import json
import math

DIGITS = 7  # as many as fp32 has: with six, a second rounding changes the last digit of some numbers on the pages
WIDTH = 240  # of a line in characters; only a single longer string makes a line longer
# Fields of an epoch, of a factorized layer and of the exchange that neither pages nor plots nor the checks of results read. The
# relative error of a layer is sqrt(1 - kept_energy); the digest of the last epoch is the digest of the run.
UNUSED = {"history": ("digest", "seconds"), "layers": ("truncation_error", "relative_error", "parameters_after"),
          "exchange": ("plan",)}


def without(item, fields):
    """A copy of an object without these fields."""
    return {name: value for name, value in item.items() if name not in fields} if isinstance(item, dict) else item


def of_training(document):
    """A copy of a training program's result with the fields that are read."""
    def reduced(place, name):
        if isinstance(place.get(name), list):
            place[name] = [without(item, UNUSED[name]) for item in place[name]]
    kept = dict(document)
    reduced(kept, "history")
    if isinstance(kept.get("switch"), dict):
        kept["switch"] = dict(kept["switch"])
        reduced(kept["switch"], "layers")
    if "exchange" in kept:
        kept["exchange"] = without(kept["exchange"], UNUSED["exchange"])
    return kept


def of_series(rows, along, fields):
    """Joins rows that differ in `along` and in `fields` only into one object each, in which these are lists. A field that is the
    same in all joined rows remains a single value."""
    series = {}
    for row in rows:
        series.setdefault(json.dumps(without(row, (along, *fields))), {})[row[along]] = row
    joined = []
    for common, members in series.items():
        of = {name: [row[name] for row in members.values()] for name in fields if name in next(iter(members.values()))}
        joined.append({**json.loads(common), along: list(members),
                       **{name: values[0] if len(set(values)) == 1 else values for name, values in of.items()}})
    return joined


def rounded(value):
    """Numbers with DIGITS significant digits, but no coarser than to a whole. `options` remain what the user has typed."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return value
        return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else float(round(value))
    if isinstance(value, dict):
        return {name: inner if name == "options" else rounded(inner) for name, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def laid_out(value, depth=0, column=0):
    """JSON of a value that starts at `column`. A value that does not fit into its line is broken: an object or a list within a
    list has a line of its own, all other items share lines."""
    whole = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or column + len(whole) <= WIDTH:
        return whole
    margin = " " * (depth + 1)
    named = [(f"{json.dumps(str(name))}: ", inner) for name, inner in value.items()] if isinstance(value, dict) else [
        ("", inner) for inner in value]
    parts, shared = [], False  # whether the next item may share the line of the last part
    for name, inner in named:
        item = name + laid_out(inner, depth + 1, len(margin) + len(name))
        alone = "\n" in item or (not name and isinstance(inner, (dict, list)))
        if shared and not alone and len(margin) + len(parts[-1]) + len(item) + 3 <= WIDTH:  # with ", " and a comma
            parts[-1] += f", {item}"
        else:
            parts.append(item)
        shared = not alone
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{margin}" + f",\n{margin}".join(parts) + f"\n{' ' * depth}{closing}"


def text(document):
    """The file of a document."""
    return laid_out(rounded(document)) + "\n"


def lines(rows):
    """The file of rows, one JSON object a line."""
    return "".join(json.dumps(rounded(row)) + "\n" for row in rows)
