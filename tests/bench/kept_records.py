#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/records.py, and what bench/compare and bench/first_run keep: fields, digits and layout. All numbers are invented."""
import importlib.machinery
import importlib.util
import json
import math
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
import compare_page  # noqa: E402
import records  # noqa: E402
import scaling_delays  # noqa: E402


def script(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "bench" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


EPOCH = {"epoch": 1, "low_rank": False, "learning_rate": 0.09293917099991263, "test_accuracy": 34.42, "ms_per_step": 111.072164}
LAYER = {"name": "layer1.0.conv1", "rows": 16, "cols": 144, "rank": 4, "kept_energy": 0.5608501109427492, "parameters_before": 2304}


def result():
    """What a training program writes."""
    layer = {**LAYER, "truncation_error": 2.67, "relative_error": 0.66, "parameters_after": 640}
    return {"options": {"epochs": 3, "weight_decay": 0.000123456789}, "accuracy": 98.33333333333333, "digest": "96838a1ae584990b",
            "exchange": {"payload_bytes": 833128, "plan": {"bucket_bytes": 4194304}}, "diverged": None,
            "switch": {"milliseconds": 715.190995, "layers": [layer] * 16},
            "history": [{**EPOCH, "epoch": e, "seconds": 21.9, "digest": "674eaa96ff3e4365"} for e in (1, 2, 3)]}


class Training(unittest.TestCase):
    def test_unused_fields_are_left_out(self):
        document = result()
        kept = records.of_training(document)
        self.assertEqual(document, result())  # a copy
        self.assertEqual(kept["history"], [{**EPOCH, "epoch": e} for e in (1, 2, 3)])
        self.assertEqual(kept["switch"], {"milliseconds": 715.190995, "layers": [LAYER] * 16})
        self.assertEqual(kept["exchange"], {"payload_bytes": 833128})
        self.assertEqual(kept["digest"], document["digest"])
        self.assertEqual(records.of_training(kept), kept)

    def test_other_results_remain(self):
        for document in ({"codecs": [{"digest": 1}]}, {"history": None, "switch": None, "exchange": None}, {"exchange": "none"}):
            self.assertEqual(records.of_training(document), document)


class Text(unittest.TestCase):
    def test_it_is_the_same_document(self):
        text = records.text(result())
        self.assertEqual(json.loads(text), records.rounded(result()))
        self.assertEqual(records.text(json.loads(text)), text)
        for document in ({}, [], [[]], {"a": []}, {"a": [[1, 2]] * 90}, {"ä": "x" * 300, "b": ["y" * 300, {"c": "z" * 300}]}):
            self.assertEqual(json.loads(records.text(document)), document)

    def test_an_epoch_and_a_layer_have_a_line_each(self):
        lines = records.text(records.of_training(result())).splitlines()
        for start in ('  {"epoch": ', '   {"name": '):
            self.assertEqual(sum(line.startswith(start) for line in lines), 3 if "epoch" in start else 16)
        self.assertEqual(lines[1], ' "options": {"epochs": 3, "weight_decay": 0.000123456789}, "accuracy": 98.33333, "digest": '
                         '"96838a1ae584990b", "exchange": {"payload_bytes": 833128}, "diverged": null,')

    def test_lines_are_of_limited_length(self):
        values = list(range(1000, 3000))
        lines = records.text({"values": values, "names": {str(v): v for v in values}}).splitlines()
        self.assertLessEqual(max(map(len, lines)), records.WIDTH)
        self.assertGreater(min(map(len, lines[2:30])), records.WIDTH - 20)

    def test_digits(self):
        for value, kept in ((0.09293917099991263, 0.09293917), (98.33333333333333, 98.33333), (63.14498643356795, 63.14499), (0.0, 0.0),
                            (1.784123247916547e-07, 1.784123e-07), (123456789.6, 123456790.0), (-2.5, -2.5), (7, 7), (True, True)):
            self.assertEqual(records.rounded([value]), [kept])
        self.assertIs(type(records.rounded(1.0)), float)
        self.assertEqual(records.rounded({"options": {"rate": 0.000123456789}})["options"]["rate"], 0.000123456789)
        self.assertTrue(math.isnan(records.rounded(math.nan)) and records.rounded(math.inf) == math.inf)


class Series(unittest.TestCase):
    def test_rows_are_joined_over_the_ranks(self):
        rows = [{"kind": "prediction", "system": s, "ranks": p, "payload_bytes": 8, "buckets": p, "step_ms": 2.0 * p + (s == "dense")}
                for p in (8, 64) for s in ("dense", "Pufferfish")]
        self.assertEqual(scaling_delays.series([*rows, rows[0]]), [
            {"kind": "prediction", "system": "dense", "ranks": [8, 64], "payload_bytes": 8, "step_ms": [17.0, 129.0]},
            {"kind": "prediction", "system": "Pufferfish", "ranks": [8, 64], "payload_bytes": 8, "step_ms": [16.0, 128.0]}])
        self.assertEqual(records.lines([{"a": 1 / 3}, {"b": 2}]), '{"a": 0.3333333}\n{"b": 2}\n')


class Page(unittest.TestCase):
    def row(self, **more):
        results = {"ours": {"ms": 2.0}, "ours, float": {"ms": 4.0}, "oneDNN 3.2 direct": {"ms": 3.0}}
        return {"work": "a layer", "count": 2, "results": results, "ratios": {"ours, float": 2.0, "oneDNN 3.2 direct": 1.5}, **more}

    def test_convolutions(self):
        refused = "oneDNN 3.2 has no Winograd algorithm for bfloat16 on this machine: `could not create`."
        content = {"section": "conv_bf16", "batch": 8, "rows": [self.row()], "winograd_refused": {"oneDNN 3.2": "could not create"}}
        lines = compare_page.conv_section(content)
        for line in ("| oneDNN 3.2 direct | 6.0 | 1.50 |", "| ours, float | 8.0 | 2.00 |", "| ours | 4.0 | 1.00 |", refused):
            self.assertIn(line, lines)
        self.assertFalse(any("bound" in line for line in lines))
        self.assertNotIn(refused, compare_page.conv_section({**content, "winograd_refused": {}}))

    def test_goal_counts_each_direct_form(self):
        content = {"section": "conv", "threads": 1, "rows": [self.row()]}
        self.assertTrue(any("| 1.50 | met |" in line for line in compare_page.goal_lines({"conv": {1: content}})))

    def test_steps_over_images_and_sequences(self):
        lines = compare_page.bf16_section({"batch": 8, "rows": [self.row(), self.row(work="a sequence", batch=4)]})
        self.assertIn("| ms; batch 8 | a layer |", lines)
        self.assertIn("| ms | a sequence |", lines)
        self.assertIn("| a sequence | 2.00 |", lines)


class Kept(unittest.TestCase):
    def test_rounds_of_contestants(self):
        kept = script("compare").kept
        ours = {"ms": 2.0, "min": 1.0, "max": 3.0, "bound_ms": 0.5}
        content = {"section": "conv", "rounds": 3, "rows": [{"work": "a layer", "results": {"ours": {**ours, "rounds": [1.0, 2.0, 3.0]}}}]}
        self.assertEqual(kept(content), {"section": "conv", "rounds": 3, "rows": [{"work": "a layer", "results": {"ours": ours}}]})

    def test_points_and_rows_of_our_own(self):
        kept = script("compare").kept
        point = {"sweep": "rank", "value": 4, "direction": "forward", "ms": 0.5}
        content = kept({"section": "sweep", "points": [{**point, "isa": "avx512", "gflops": 1.0}], "rows": [{"work": "no results"}]})
        self.assertEqual(content, {"section": "sweep", "points": [point], "rows": [{"work": "no results"}], "isa": "avx512"})
        self.assertEqual(kept(content), content)
        row = {"layer": "conv1", "ms": 0.5, "ms_min": 0.4, "ms_max": 0.6}
        self.assertEqual(kept({"section": "kernels", "rows": [{**row, "precision": "fp32", "peak_gflops": 9.0}]}),
                         {"section": "kernels", "precision": "fp32", "rows": [row]})
        self.assertEqual(kept({"section": "kernels", "rows": []}), {"section": "kernels", "rows": []})

    def test_quickstart_without_curves(self):
        run = {"seed": 1, "accuracy": 98.3}
        modes = [{"mode": "dense", "runs": [{**run, "history": [EPOCH], "switch": {}}]}]
        self.assertEqual(script("first_run").of_quickstart(modes), [{"mode": "dense", "runs": [run]}])


if __name__ == "__main__":
    unittest.main()
