#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/compressors with stand-ins for the programs: the bytes of all systems; which runs there are; runs that are kept,
interrupted, fail or diverge; the predicted time of a step; what the page says. All numbers of runs are invented."""
import unittest

from study_support import ROOT, Folder

import compressor_bytes as sizes  # noqa: E402
import compressor_rows as rows_of  # noqa: E402
import compressors_page as page_of  # noqa: E402
import study_runs  # noqa: E402
from compressor_rows import ROWS, Timing, Training  # noqa: E402

STEPS = ROOT / "docs" / "results" / "exchange" / "step-2-hosts-1gbit.json"
DENSE, HYBRID = sizes.resnet18("dense"), sizes.resnet18("hybrid")


class Bytes(unittest.TestCase):
    def test_networks(self):
        self.assertEqual([(sizes.total(s), len(s), sizes.total(sizes.matrices(s))) for s in (DENSE, HYBRID)],
                         [(11_173_834, 60, 11_164_352), (3_336_138, 74, 3_326_656)])

    def test_payloads(self):
        for name, dense, hybrid in (
                ("none", 44_695_336, 13_344_552), ("bf16", 22_347_668, 6_672_276), ("powersgd-1", 183_228, 190_652),
                ("powersgd-2", 328_528, 343_376), ("powersgd-4", 619_128, 648_824), ("signum", 1_396_732, 417_020),
                ("topk-0.1", 8_938_832, 2_668_624), ("topk-0.01", 893_768, 266_696), ("randomk", 446_884, 133_348),
                ("randomblock", 446_884, 133_348), ("dgc-0.001", 127_312, 64_688), ("efsign", 1_396_972, 417_316),
                ("onebit", 1_435_524, 463_236), ("binary", 1_397_212, 417_612), ("qsgd-2", 2_880_755, 860_099),
                ("qsgd-4", 5_674_213, 1_694_133), ("qsgd-8", 11_261_130, 3_362_202), ("terngrad", 2_793_459 + 480, 834_035 + 592),
                ("atomo", 4_939_848, 1_339_888), ("pactrain-0.5", 22_366_632, 6_691_240), ("pactrain-0.8", 8_969_412, 2_699_256),
                ("rare-blocktopk", 327_684, 98_092)):
            of = ROWS[name].messages
            self.assertEqual((sizes.payload(of(DENSE), 8), sizes.payload(of(HYBRID), 8)), (dense, hybrid), name)

    def test_sent_bytes(self):
        self.assertEqual([sizes.sent([sizes.Sum(800)], p) for p in (1, 2, 8)], [0, 800, 1400])
        self.assertEqual([sizes.sent(sizes.signum(DENSE), p) for p in (2, 4, 8, 16)], [1_396_732, 4_190_196, 9_777_124, 20_950_980])
        self.assertEqual(sizes.sent(sizes.signum_two_hop(DENSE), 8), 3_666_428)

        def bits(elements, pieces, ranks=0):
            return sizes.bit_words(elements)
        two_hop = [sizes.TwoHop(DENSE, bits, bits)]
        self.assertEqual([sizes.sent(two_hop, p) for p in (2, 4, 8, 16)], [1_396_732, 2_095_100, 2_444_284, 2_618_876])

    def test_stripes_and_pieces(self):
        # 100 elements of tensors of 40 and 60, stored last to first: stripes of 64 and 36, the first with pieces of both tensors.
        of = sizes.TwoHop([(40,), (60,)], lambda n, pieces: n + 1000 * pieces, lambda n, pieces, ranks: n + 1000 * pieces)
        self.assertEqual([of.stripe(r, 2) for r in range(2)], [(64, 2), (36, 1)])
        self.assertEqual((of.payload(2), of.sent(2)), (3100 + 2064, 1036 + 2064))
        self.assertEqual([of.stripe(r, 8) for r in range(8)][3:6], [(4, 1), (0, 0), (0, 0)])

    def test_two_hops_of_the_library(self):
        # Of rank 0, as bench_exchange writes them on two ranks.
        self.assertEqual(sizes.payload(sizes.double_squeeze(HYBRID), 2), 625_900)
        self.assertEqual(sizes.payload(sizes.signum_two_hop(HYBRID), 2), 834_044)

    def test_block_top_k(self):
        self.assertEqual([sizes.payload(sizes.block_top_k([shape]), 2) for shape in ((64, 64), (128, 640), (8192,), (64, 65), (1,))],
                         [120, 2400, 240, 131, 11])

    def test_two_hops_send_less_from_three_ranks_on(self):
        for ranks in (3, 4, 8, 64):
            self.assertLess(sizes.sent(sizes.double_squeeze(DENSE), ranks), sizes.sent(sizes.ef_sign(DENSE), ranks))


class Rows(unittest.TestCase):
    def test_every_run_has_a_file_of_its_own(self):
        jobs = [*rows_of.timings(), *rows_of.first_runs()]
        self.assertEqual(len({job.file for job in jobs}), len(jobs))
        self.assertEqual(len({job.shown() for job in jobs}), len(jobs))

    def test_first_rates_come_first(self):
        jobs = rows_of.first_runs()
        first = [job for job in jobs if job.rate == job.row.rates[0]]
        self.assertEqual(jobs[:len(first)], first)
        self.assertEqual({(job.name, job.mode) for job in first},
                         {(row.name, mode) for row in ROWS.values() if not row.same_as for mode in row.modes})

    def test_codecs_have_the_options_of_training(self):
        self.assertEqual(ROWS["qsgd-2"].codec, ["--compressors", "qsgd", "--compress-bits", "2"])
        self.assertEqual(ROWS["signum-two-hop"].codec, ["--compressors", "signum", "--compress-route", "two-hop"])
        for name in ("none", "bf16", "powerfish", "rare", "pactrain-0.5"):
            self.assertEqual(ROWS[name].codec, [], name)

    def test_options_are_those_of_the_examples(self):
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*pp"))
        for row in ROWS.values():
            for word in row.options.split():
                if word.startswith("--"):
                    self.assertTrue(f'"{word}"' in text, f"{row.name}: {word}")
            if row.codec:
                self.assertTrue(f'{{"{row.codec[1]}",' in text, row.name)

    def test_best_rate_and_further_seeds(self):
        known = {job: {"accuracy": 70.0, "diverged": None} for job in rows_of.first_runs()}
        for name, mode, rate, accuracy in (("signum", "dense", 0.0005, 79.0), ("topk-0.1", "hybrid", 0.1, 78.0)):
            known[Training(name, mode, rate, 1)]["accuracy"] = accuracy
        known[Training("signum", "dense", 0.002, 1)] = {"accuracy": None, "diverged": "no finite loss"}
        self.assertEqual(rows_of.chosen_rate("signum", "dense", known), 0.0005)
        self.assertEqual(rows_of.chosen_rate("signum-two-hop", "dense", known), 0.0005)
        more = rows_of.further_runs(known)
        self.assertEqual(len(more), 2 * (rows_of.BEST + 2))
        for job in (Training("signum", "dense", 0.0005, 3), Training("topk-0.1", "hybrid", 0.1, 2), Training("none", "dense", 0.1, 2)):
            self.assertIn(job, more)
        del known[Training("rare", "dense", 0.1, 1)]
        self.assertEqual(rows_of.further_runs(known), [])


class Study(Folder):
    script = "compressors"

    def page(self):
        return (self.results / "compressors.md").read_text(encoding="utf-8")

    def keep(self, name, mode, accuracy, rate=None, seed=1, **more):
        """Puts a result of a run into the study's folder."""
        job = Training(name, mode, rate or ROWS[name].rates[0], seed)
        hybrid = mode == "hybrid"
        history = [{"epoch": e + 1, "low_rank": hybrid and e > 0, "test_accuracy": accuracy - 10 * (3 - e), "ms_per_step": 100.0,
                    "exchange_ms": 9.0} for e in range(4)]
        document = {"options": {"epochs": 4, "batch": 128}, "accuracy": accuracy, "before": {"bytes_per_step": 1_000_000},
                    "after": {"bytes_per_step": 500_000}, "exchange": {"payload_bytes": 500_000}, "history": history,
                    "finished": True, "diverged": None, "command": job.shown(), "machine": "a machine", "compiler": "a compiler",
                    "commit": "abc", "wall_seconds": 240.0}
        study_runs.write(self.results / "compressors" / job.file, {**document, **more})

    def keep_codec(self, name, encode, decode):
        job = Timing(name)
        codecs = [{"mode": mode, "ranks": p, "encode_ms": encode, "decode_ms": decode, "copy_ms": 5.0} for mode in rows_of.MODES for p in rows_of.RANKS]
        study_runs.write(self.results / "compressors" / job.file, {"codecs": codecs, "command": job.shown()})

    def test_finished_runs_are_kept(self):
        arguments = ("--only", "none", "efsign", "--jobs", "2")
        self.run_script(*arguments)
        fresh = [f"{mode}-{name}-rate-0.1-seed-1 fresh" for mode in ("dense", "hybrid") for name in ("efsign", "none")]
        self.assertEqual((self.started(), self.started(self.codecs)), (fresh, ["codec-efsign"]))
        self.run_script(*arguments)
        self.assertEqual((self.started(), self.started(self.codecs)), (fresh, ["codec-efsign"]))
        text = self.page()
        self.assertIn("EF-sign | gather | 1,396,972 | 1,396,972 | 9,778,804 | 88,009,236 | 1.0 | 2.0 | 8.0 | 64.0 |",
                      self.row(text, "## Bytes", "EF-sign"))
        self.assertTrue(self.row(text, "## Accuracy", "DoubleSqueeze").startswith("| DoubleSqueeze | not run |"))
        self.assertIn("Missing: PowerSGD, rank 1: codec, dense 0.1 1, hybrid 0.1 1; ", text)
        self.assertIn("not timed", self.row(text, "## Bytes", "TernGrad"))
        (self.results / "compressors" / "codec-efsign.json").unlink()
        self.run_script(*arguments)
        self.assertEqual(self.started(self.codecs), ["codec-efsign"] * 2)

    def test_interrupted_study_goes_on_from_a_checkpoint(self):
        self.check_interruption("dense-none-rate-0.1-seed-1", "--only", "none")

    def test_failed_run_stops_no_other(self):
        (self.train.parent / "fail-dense-none-rate-0.1-seed-1").touch()
        shown = self.run_script("--only", "none", status=1)
        self.assertIn("none, dense, rate 0.1, seed 1: exit status 1; its output is in", shown)
        self.assertEqual([p.name for p in (self.results / "compressors").glob("*.json")], ["hybrid-none-rate-0.1-seed-1.json"])

    def test_diverged_run_is_a_result(self):
        (self.train.parent / "diverge-dense-efsign-rate-0.1-seed-1").touch()
        for _ in range(2):
            self.run_script("--only", "efsign")
        self.assertEqual(self.started().count("dense-efsign-rate-0.1-seed-1 fresh"), 1)
        text = self.page()
        self.assertTrue(self.row(text, "### Dense network: width 16", "EF-sign").startswith("| EF-sign | **diverged** at 1 of 1 rates |"))
        self.assertIn("- EF-sign, dense: **loses**: it diverged at 1 of 1 rates.", text)

    def test_nothing_has_run(self):
        self.assertIn("nothing has run: no page is written", self.run_script("--page", status=1))
        self.assertFalse((self.results / "compressors.md").exists())

    def test_list_runs_nothing(self):
        shown = self.run_script("--list", "--only", "none")
        self.assertIn("none, hybrid, rate 0.1, seed 1: about 4 minutes: mpirun -np 2", shown)
        self.assertIn("about 0.1 hours are left", shown)
        self.assertEqual(self.started(), [])

    def test_program_is_not_built(self):
        self.codecs.unlink()
        self.assertIn("bench_compressors is not built", self.run_script("--only", "efsign", status=1))

    def test_unreadable_result(self):
        path = self.results / "compressors" / Training("none", "dense", 0.1, 1).file
        path.parent.mkdir(parents=True)
        path.write_text("{", encoding="utf-8")
        self.assertIn("not readable as JSON", self.run_script("--page", status=1))

    def test_prediction(self):
        self.keep_codec("efsign", 20.0, 30.0)
        steps = page_of.step_times(STEPS)
        results = page_of.Results({Timing("efsign"): study_runs.read(self.results / "compressors" / "codec-efsign.json")}, steps)
        t = steps["dense"]
        travel = 8 * 7 * 1_396_972 / 1e9 * 1e3  # ms at 1 Gbit/s
        self.assertAlmostEqual(results.step_ms(ROWS["efsign"], "dense", 8, 1), t.compute + 20 + travel + 30 + t.update, places=6)
        travel = 8 * 1.75 * 44_695_336 / 1e8 * 1e3
        self.assertAlmostEqual(results.step_ms(ROWS["none"], "dense", 8, 0.1), t.forward + travel + t.update, places=6)
        self.assertAlmostEqual(results.step_ms(ROWS["none"], "dense", 2, 1e6), t.compute + t.update, places=6)
        self.assertIsNone(results.step_ms(ROWS["rare"], "dense", 2, 1))  # how many local steps is not known
        self.assertIsNone(results.step_ms(ROWS["onebit"], "dense", 2, 1))
        self.assertAlmostEqual(results.copies(ROWS["efsign"], "dense", 2), 10.0)
        self.assertEqual(page_of.copies_goal("dense", results),
                         ["Goals: 8 copies for top-k, 3 for signs, three levels and few bits. Missed by EF-sign (10.0).", ""])
        self.assertEqual((results.copies(ROWS["none"], "dense", 2), results.copies(ROWS["onebit"], "dense", 2)), (None, None))

    def test_prediction_of_rare_exchanges(self):
        rare = {"local_steps": 80, "outer_steps": 10, "payload_bytes_a_step": 1.0, "exposed_ms": 0.0}
        for name in ("rare", "rare-blocktopk"):
            self.keep(name, "dense", 79.0, exchange={"payload_bytes": 1, "rare": rare})
        self.keep_codec("rare-blocktopk", 16.0, 24.0)
        jobs = [Timing("rare-blocktopk"), *(Training(name, "dense", 0.1, 1) for name in ("rare", "rare-blocktopk"))]
        known = {job: study_runs.read(self.results / "compressors" / job.file) for job in jobs}
        steps = page_of.step_times(STEPS)
        results, t = page_of.Results(known, steps), steps["dense"]
        self.assertAlmostEqual(results.step_ms(ROWS["rare"], "dense", 2, 1), t.compute + 8e-6 * 44_695_336 / 8 + t.update, places=6)
        sent = sizes.sent(sizes.block_top_k(DENSE), 2)
        self.assertAlmostEqual(results.step_ms(ROWS["rare-blocktopk"], "dense", 2, 1), t.compute + (40 + 8e-6 * sent) / 8 + t.update,
                               places=6)

    def test_steps_without_times_are_refused(self):
        self.keep("none", "dense", 80.0)
        path = self.folder / "steps.json"
        path.write_text('{"kind": "link"}\n', encoding="utf-8")
        self.assertIn("no times of a dense or hybrid ResNet-18's step", self.run_script("--page", "--steps", str(path), status=1))

    def test_page_says_what_loses(self):
        for seed, accuracy in ((1, 80.0), (2, 80.4)):
            self.keep("none", "dense", accuracy, seed=seed)
        self.keep("powersgd-4", "dense", 79.5)
        self.keep_codec("powersgd-4", 2.0, 2.0)
        self.keep("efsign", "dense", 70.0)
        self.keep_codec("efsign", 30.0, 300.0)
        for rate, accuracy in ((0.001, 60.0), (0.0005, 77.0)):
            self.keep("signum", "dense", accuracy, rate=rate)
        self.run_script("--page")
        text = self.page()
        self.assertIn("- EF-sign, dense: 10.00 points below none; **loses** at 0.1 Gbit/s to PowerSGD, rank 4, at 1 and 10 Gbit/s to none.",
                      text)
        self.assertIn("- PowerSGD, rank 4, dense: 0.50 points below none; **loses** at 10 Gbit/s to none; at 0.1 and 1 Gbit/s nothing is "
                      "both faster and more accurate.", text)
        self.assertIn("| 1: 80.00, 2: 80.40 | 80.20 (80.00 to 80.40) |  |", self.row(text, "### Dense network: width", "none"))
        self.assertIn("| 10 | none, dense: 856 ms, 80.00 % |", text)
        self.assertIn("| 1 | PowerSGD, rank 4, dense: 869 ms, 79.50 %; none, dense: 900 ms, 80.00 % |", text)
        signum = self.row(text, "### Dense network: width", "Signum")
        self.assertIn("| **0.0005** of 0.0005, 0.001, 0.002 (2 tried) |", signum)
        self.assertIn("| 1: 77.00 | 77.00 | 3.00 |", signum)
        self.assertEqual(signum.split("|")[2], self.row(text, "### Dense network: width", "Signum, two hops").split("|")[2])
        # 1 MB in a step at 0.1 Gbit/s takes 80 ms, so 391 steps take 70.38 s. Seed 1 has 75 % after 3.5 epochs, seed 2 after 3.46.
        self.assertTrue(self.row(text, "### Dense network: width", "none").rstrip(" |").endswith("| 245 | 273"),
                        self.row(text, "### Dense network: width", "none"))

    def test_published_numbers_have_a_source(self):
        for family, _, where in page_of.PUBLISHED:
            self.assertIn(family, page_of.ABOUT)
            self.assertTrue(where)
        self.assertEqual(set(page_of.ABOUT), {row.family for row in ROWS.values()})


if __name__ == "__main__":
    unittest.main()
