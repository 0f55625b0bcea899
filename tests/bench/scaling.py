#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bench/scaling: the simulated step against what can be computed by hand, exact payloads, and input that is refused. All
measurements in here are invented."""
import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import compressor_bytes as sizes  # noqa: E402
import scaling_delays as delays  # noqa: E402
import scaling_model as model  # noqa: E402
import scaling_rare as rare  # noqa: E402
import scaling_records as records  # noqa: E402
import scaling_report as report  # noqa: E402
import scaling_systems as systems  # noqa: E402
import study_runs  # noqa: E402
from compressor_rows import ROWS, Timing  # noqa: E402
from scaling_model import PIECE, WINDOW, Bucket, Cluster, Codec, Link, Network, Rounds  # noqa: E402
from scaling_rare import Outer  # noqa: E402
from scaling_systems import System  # noqa: E402

# Powers of two, so that sums by hand are exact: 1 KiB/s, messages of 1/8 s.
SLOW = Link(rate=1024.0, latency=0.125)


def one_bucket(size, ready=1.0, compute=1.0):
    return Network((Bucket(size, ready),), compute, 0.25)


def step(network, link, ranks, **more):
    return model.overlapped(network, Cluster(ranks, link, **more))


# The ResNet-18 in one bucket, complete with the backward pass.
WHOLE = {"dense": one_bucket(44_695_336), "hybrid": one_bucket(13_344_552)}


def whole_step(system, cluster, codec=Codec(), **more):
    return systems.simulate(WHOLE[system.mode], system, codec, cluster, **more)


class Rows(unittest.TestCase):
    """The systems are the rows of bench/compressors."""

    def test_all_of_them(self):
        found = systems.systems()
        self.assertEqual({(s.name, s.mode) for s in found}, {(row.name, mode) for row in ROWS.values() for mode in row.modes})
        self.assertEqual(len({s.title for s in found}), len(found))
        self.assertEqual([s.title for s in systems.systems(["none", "efsign"])],
                         ["dense", "dense + EF-sign", "Pufferfish", "Pufferfish + EF-sign"])

    def test_sent_bytes_are_those_of_compressor_bytes(self):
        for system in systems.systems():
            for ranks in (2, 3, 8, 64):
                with self.subTest(system=system.title, ranks=ranks):
                    step = whole_step(system, Cluster(ranks, SLOW, algorithm="ring"))
                    sent = sizes.sent(system.row.messages(sizes.resnet18(system.mode)), ranks)
                    lengths = sum(getattr(m, "lengths", False) for m in systems.messages(system.name, system.mode))
                    self.assertAlmostEqual(step.sent / (sent / (system.row.local_steps or 1)), 1, places=9 - 3 * lengths)

    def test_names_in_records(self):
        self.assertEqual([systems.row_of(name) for name in ("none", "bf16", "powersgd-r4", "powersgd r2", "signum",
                                                            "topk --compress-ratio 0.01", "signum --compress-route two-hop")],
                         ["none", "bf16", "powersgd-4", "powersgd-2", "signum", "topk-0.01", "signum-two-hop"])
        for name in ("powersgd-r7", "powersgd-r", "huffman", "rare", "blocktopk", "pactrain-0.5", "powerfish"):
            self.assertIsNone(systems.row_of(name), name)

    def test_two_sums_of_power_sgd(self):
        # P and what is not compressed, then Q; conv1 of 64 x 27 is 64 x 4 and 27 x 4.
        self.assertEqual(sizes.power_sgd([(64, 3, 3, 3), (64,), (2, 2)], 4), [sizes.Sum(4 * (256 + 64 + 4)), sizes.Sum(4 * 108)])
        self.assertEqual(systems.collectives("terngrad", "dense", 8)[0], ("sum", 480))
        self.assertEqual(systems.collectives("atomo-entry", "dense", 8)[0], ("lengths", 8))

    def test_other_networks(self):
        with self.assertRaisesRegex(ValueError, "not the ResNet-18"):
            systems.check(one_bucket(4000), System("powersgd-4", "dense"))
        systems.check(one_bucket(4000), System("bf16", "dense"))

    def test_parameter_servers_add_and_count(self):
        systems.check(WHOLE["dense"], System("signum", "dense"), "ps")
        for name in ("topk-0.01", "signum-two-hop", "rare"):
            with self.assertRaisesRegex(ValueError, "parameter servers"):
                systems.check(WHOLE["dense"], System(name, "dense"), "ps")


class Collectives(unittest.TestCase):
    """Alpha, beta and gamma by hand."""

    def test_ring(self):
        exposed = step(one_bucket(1024), SLOW, 4, algorithm="ring").exposed
        self.assertEqual(exposed, 2 * 3 * (0.125 + 0.25))

    def test_the_last_piece_of_a_message_is_worked_on_when_it_is_there(self):
        link = Link(1024.0, 0.125, host=2.0**-14)
        self.assertEqual(step(one_bucket(1024), link, 4, algorithm="ring").exposed, 2.25 + 6 * 256 * 2.0**-14)
        large = 16 * PIECE
        link = Link(float(large), 0.0, host=0.5 / large)
        self.assertEqual(step(one_bucket(large), link, 2, algorithm="ring").exposed, 1.0 + 2 * PIECE * 0.5 / large)

    def test_hosts_are_no_faster_than_they_are(self):
        self.assertEqual(step(one_bucket(16 * PIECE), Link(1e12, 0.0, host=2.0**-20), 2, algorithm="ring").exposed,
                         16 * PIECE * 2.0**-20)

    def test_recursive_doubling(self):
        of = {p: step(one_bucket(1024), SLOW, p, algorithm="recursive doubling").exposed for p in (2, 3, 4, 7, 8)}
        once = 1.125
        self.assertEqual(of, {2: once, 3: 3 * once, 4: 2 * once, 7: 4 * once, 8: 3 * once})

    def test_the_faster_of_both(self):
        for size, algorithm in [(8, "recursive doubling"), (1 << 20, "ring")]:
            for ranks in (4, 64):
                of = {a: step(one_bucket(size), SLOW, ranks, algorithm=a).exposed for a in ("best", algorithm)}
                self.assertEqual(of["best"], of[algorithm])

    def test_narrow_and_gather(self):
        narrow = model.overlapped(one_bucket(4096), Cluster(4, SLOW), "narrow", 0.5)
        self.assertEqual((narrow.exposed, narrow.sent), (6 * 0.625, 6 * 512))
        self.assertEqual(model.run(model.all_gather(512, 4), {False: model.Wire(SLOW)}, 0.0), 3 * 0.625)

    def test_bytes_sent(self):
        self.assertEqual(step(one_bucket(1024), SLOW, 4, algorithm="ring").sent, 2 * 3 * 256)
        self.assertEqual(step(one_bucket(1024), SLOW, 4, algorithm="recursive doubling").sent, 2 * 1024)


class Overlap(unittest.TestCase):
    def test_hidden_completely(self):
        # Two ranks: a message of 0.25 s there, one back.
        hidden = step(one_bucket(256, ready=0.25), SLOW, 2, algorithm="ring")
        self.assertEqual([(e.start, e.end) for e in hidden.timeline], [(0.25, 0.75)])
        self.assertEqual((hidden.exposed, hidden.total), (0.0, 1.25))

    def test_partly_hidden(self):
        self.assertEqual(step(one_bucket(256, ready=0.75), SLOW, 2, algorithm="ring").exposed, 0.25)

    def test_the_second_waits_for_the_first(self):
        network = Network((Bucket(768, 0.5), Bucket(256, 0.75)), 1.0, 0.0)
        result = step(network, SLOW, 2, algorithm="ring")
        # Ready at 0.75; the first, of 2 (1/8 + 3/8) s, is over at 1.5.
        self.assertEqual([(e.ready, e.start, e.end) for e in result.timeline], [(0.5, 0.5, 1.5), (0.75, 1.5, 2.0)])
        self.assertEqual(result.exposed, 1.0)

    def test_a_bucket_that_is_ready_early_waits_for_its_turn(self):
        network = Network((Bucket(256, 0.75), Bucket(256, 0.25)), 1.0, 0.0)
        self.assertEqual([e.start for e in step(network, SLOW, 2, algorithm="ring").timeline], [0.75, 1.25])

    def test_a_pause_between_buckets(self):
        network = Network((Bucket(256, 0.0), Bucket(256, 0.875)), 1.0, 0.0)
        result = step(network, SLOW, 2, algorithm="ring")
        self.assertEqual([(e.start, e.end) for e in result.timeline], [(0.0, 0.5), (0.875, 1.375)])

    def test_what_the_exchange_takes_of_the_processor(self):
        link = Link(1024.0, 0.125, share=0.5)
        # From 0.5 to 1.0 only 0.25 of 0.5 is computed: the rest takes until 1.25.
        self.assertEqual(step(one_bucket(256, ready=0.5), link, 2, algorithm="ring").exposed, 0.25)
        # The second bucket is ready later, too: 0.5 + 0.5 of work, of which 0.25 came while the first was under way.
        network = Network((Bucket(256, 0.5), Bucket(256, 1.0)), 1.0, 0.0)
        self.assertEqual([e.start for e in step(network, link, 2, algorithm="ring").timeline], [0.5, 1.25])
        # Computing ends while a bucket is under way.
        self.assertEqual(step(one_bucket(1024, ready=0.75), link, 2, algorithm="ring").exposed, 1.0)
        # Nothing is computed while the host moves bytes.
        link = Link(1e12, host=2.0**-20)
        self.assertEqual(step(one_bucket(16 * PIECE, ready=0.0), link, 2, algorithm="ring").exposed, 16 * PIECE * 2.0**-20)
        # Never backwards.
        self.assertEqual(step(one_bucket(256, ready=0.5), Link(1024.0, 0.125, 0.0, 1.0), 2, algorithm="ring").exposed, 0.5)

    def test_update_of_what_has_come(self):
        network = Network((Bucket(512, 0.5), Bucket(256, 1.0), Bucket(256, 1.0)), 1.0, 0.5)
        late, early = (step(network, SLOW, 2, algorithm="ring", early_update=e) for e in (False, True))
        self.assertEqual([e.end for e in early.timeline], [1.25, 1.75, 2.25])
        # The first, a quarter of a second, until 1.5; the others an eighth each when they have come.
        self.assertEqual((late.total, early.total), (2.75, 2.375))
        self.assertEqual(early.exposed, 2.375 - 1.5)
        # Never before the end of the backward pass.
        self.assertEqual(step(one_bucket(256, 0.0), SLOW, 2, early_update=True).total, 1.25)

    def test_one_rank_communicates_nothing(self):
        network = one_bucket(44_695_336)
        for topology in ["ring", "ps", "hierarchical"]:
            for system in systems.systems(systems.SHORT if topology == "ps" else ROWS):
                result = systems.simulate(network, system, Codec(), Cluster(1, SLOW, topology))
                self.assertEqual((result.exposed, result.sent, result.total), (0.0, 0.0, 1.25), system.title)

    def test_buckets_put_together(self):
        network = Network((Bucket(1, 1.0), Bucket(3, 2.0), Bucket(4, 3.0), Bucket(9, 4.0), Bucket(1, 5.0)), 6.0, 0.0)
        self.assertEqual(network.merged(0), network)
        self.assertEqual(network.merged(8).buckets, (Bucket(8, 3.0), Bucket(9, 4.0), Bucket(1, 5.0)))
        self.assertEqual(network.merged(1 << 62).buckets, (Bucket(18, 5.0),))
        # With many ranks messages cost more than what overlaps.
        many = Network(tuple(Bucket(1024, 0.1 * i) for i in range(1, 9)), 1.0, 0.0)
        plans = [systems.best_plan(many, systems.DENSE, Codec(), Cluster(64, link), (0, 1 << 62))[1] for link in (SLOW, Link(1e6))]
        self.assertEqual(plans, [1, 8])


class Compressed(unittest.TestCase):
    codec = Codec(0.5, ((2, 0.375), (8, 0.75)))  # 0.25, and 0.0625 for each rank

    def test_sums_after_the_backward_pass(self):
        result = model.compressed(one_bucket(1 << 20, ready=0.0), Cluster(2, SLOW, algorithm="recursive doubling"), self.codec,
                                  [("sum", 512), ("sum", 256)])
        self.assertEqual((result.encode, result.exposed, result.decode), (0.5, 0.625 + 0.375, 0.375))
        self.assertEqual(result.total, 1.0 + 0.5 + 1.0 + 0.375 + 0.25)

    def test_votes_grow_with_the_ranks(self):
        for ranks in (2, 4, 8, 64):
            result = model.compressed(one_bucket(8192), Cluster(ranks, SLOW), self.codec, [("gather", 256)])
            self.assertEqual(result.exposed, (ranks - 1) * 0.375)
            self.assertEqual(result.sent, (ranks - 1) * 256)
            self.assertEqual(result.decode, 0.25 + ranks * 0.0625)

    def test_decoding_along_lines(self):
        codec = Codec(0.0, ((2, 1.0), (4, 2.0), (8, 8.0)))
        self.assertEqual([codec.decode_for(p) for p in (1, 2, 3, 4, 6, 8, 10)], [0.5, 1.0, 1.5, 2.0, 5.0, 8.0, 11.0])
        self.assertEqual(Codec(0.0, ((2, 1.0),)).decode_for(4096), 1.0)
        self.assertEqual(Codec(0.0, ((4, 1.0), (5, 4.0))).decode_for(2), 0.0)

    def test_servers_count_votes(self):
        result = model.compressed(one_bucket(8192), Cluster(64, SLOW, "ps"), self.codec, [("gather", 256)])
        self.assertEqual((result.exposed, result.decode), (2 * (0.125 + 0.25), 0.3125))


    def test_two_hops(self):
        # 4 ranks, blocks of 256 bytes there, of 512 back: 3 (1/8 + 1/4) and 3 (1/8 + 1/2).
        result = model.compressed(one_bucket(8192), Cluster(4, SLOW), Codec(), [("blocks", 256), ("gather", 512)])
        self.assertEqual((result.exposed, result.sent), (3 * 0.375 + 3 * 0.625, 3 * 256 + 3 * 512))

    def test_lengths_travel_first(self):
        # Of 8 ranks: 3 messages with 7 x 8 bytes in all.
        result = model.compressed(one_bucket(8192), Cluster(8, SLOW), Codec(), [("lengths", 8), ("gather", 256)])
        self.assertAlmostEqual(result.exposed, 3 * 0.125 + 56 / 1024 + 7 * 0.375)

    def test_bucket_by_bucket(self):
        network = Network((Bucket(512, 0.25), Bucket(512, 1.0)), 1.0, 0.0)
        own, shared = (Link(1024.0, 0.125, share=share) for share in (0.0, 2.0**-40))
        codec = Codec(0.25, ((2, 0.25),))
        gather = [("gather", 512)]
        # A quarter of a second of work, 1/8 + 1/4 for 256 bytes: until 0.875, and from 1.0 until 1.625.
        result = model.compressed_by_bucket(network, Cluster(2, own), codec, gather)
        self.assertEqual([(e.start, e.end) for e in result.timeline], [(0.25, 0.875), (1.0, 1.625)])
        self.assertEqual((result.exposed, result.sent), (0.625, 512))
        # On the computing's core the backward pass ends a quarter later.
        result = model.compressed_by_bucket(network, Cluster(2, shared), codec, gather)
        self.assertAlmostEqual(result.exposed, 0.875)
        self.assertGreater(model.compressed(network, Cluster(2, own), codec, gather).total, result.total)

    def test_who_works_bucket_by_bucket(self):
        cluster = Cluster(8, SLOW)
        for name in ("topk-0.01", "powersgd-4", "dgc-0.01", "signum-two-hop"):
            one, other = (whole_step(System(name, "dense"), cluster, self.codec, by_bucket=b) for b in (False, True))
            self.assertNotEqual(one.encode, other.encode, name)


class Delay(unittest.TestCase):
    far = Link(1024.0, 0.125, delay=2.0)

    def exposed(self, kind, ranks, link, size=1024):
        return model.compressed(one_bucket(1), Cluster(ranks, link, algorithm="ring"), Codec(), [(kind, size)]).exposed

    def test_each_message_is_late(self):
        self.assertEqual(self.exposed("sum", 4, self.far), 6 * (0.125 + 2.0 + 0.25))
        self.assertEqual(self.exposed("recursive doubling", 8, self.far), 3 * (0.125 + 2.0 + 1.0))
        self.assertEqual(self.exposed("recursive doubling", 7, self.far), 4 * 3.125)
        self.assertEqual(self.exposed("gather", 4, self.far), 3 * 3.125)
        self.assertEqual(self.exposed("blocks", 4, self.far), 3 * 3.125)
        self.assertEqual(self.exposed("narrow", 4, self.far), 6 * 2.375)

    def test_no_delay_is_the_old_formula(self):
        for system in systems.systems():
            for topology in ["ring", "hierarchical"]:
                links = [Link(1e8, 5e-5, 1e-9, 0.5), Link(1e8, 5e-5, 1e-9, 0.5, 0.0, 0.0, float(WINDOW))]
                one, other = (whole_step(system, Cluster(64, link, topology, early_update=True)) for link in links)
                self.assertEqual(one, other, system.title)

    def test_window(self):
        # Three windows of a link that carries one in half a second. The pieces of one go, and the next piece when one of the other
        # side has come: 2 s and a piece's time after the first.
        rate = 2.0 * WINDOW
        link = Link(rate, 0.0, delay=2.0, window=float(WINDOW))
        once = Rounds(1, 3 * WINDOW).run({False: model.Wire(link)}, 0.0)
        self.assertAlmostEqual(once, 2.0 + 2 * (2.0 + PIECE / rate) + 0.5)
        # A link that is slower than the window has no gaps.
        slow = Link(0.25 * WINDOW, 0.0, delay=2.0, window=float(WINDOW))
        self.assertEqual(Rounds(1, 3 * WINDOW).run({False: model.Wire(slow)}, 0.0), 2.0 + 12.0)
        # Ranks that share a link have each a window.
        self.assertEqual(link.idle(4 * WINDOW, sharers=4), 2.0)

    def test_nothing_is_computed_less_for_waiting(self):
        network = Network((Bucket(256, 0.0), Bucket(256, 1.0)), 1.0, 0.0)
        idle = Link(1024.0, 0.0, share=0.5, delay=0.125)
        # 2 (1/8 + 1/8): of half a second half is delay, so an eighth is lost.
        self.assertEqual(step(network, idle, 2, algorithm="ring").timeline[1].ready, 1.0)
        self.assertEqual(step(network, idle, 2, algorithm="ring").timeline[1].start, 1.125)

    def test_parameter_servers(self):
        self.assertEqual(model.overlapped_servers(one_bucket(1024), Cluster(64, self.far, "ps")).exposed, 2 * (0.125 + 2.0 + 1.0))

    def test_longer_delays_never_help(self):
        for system in systems.systems():
            links = [Link(1e8, 5e-5, delay=d, window=float(WINDOW)) for d in (0.0, 0.001, 0.1, 0.2)]
            times = [systems.best_plan(WHOLE[system.mode], system, Codec(), Cluster(8, link))[0].total for link in links]
            self.assertEqual(times, sorted(times), system.title)


class Rare(unittest.TestCase):
    def test_every_rank_waits_without_delay_steps(self):
        self.assertEqual(rare.waiting(Outer(8), 1.0, 4.0), 0.5)
        self.assertEqual(rare.waiting(Outer(8, 4), 1.0, 1.0), 0.5)
        self.assertEqual(rare.waiting(Outer(1, 4), 1.0, 1.0), 4.0)  # all fragments after the same step

    def test_hidden_behind_delay_steps(self):
        self.assertEqual(rare.waiting(Outer(8, 1, 4), 1.0, 4.0), 0.0)
        self.assertEqual(rare.waiting(Outer(8, 1, 4), 1.0, 6.0), 2.0 / 8)
        self.assertEqual(rare.waiting(Outer(8, 2, 2), 1.0, 3.0), 2 * 1.0 / 8)

    def test_a_thread_that_cannot_keep_up(self):
        # 4 fragments of 5 s in rounds of 8 steps of 1 s: 20 s.
        self.assertAlmostEqual(rare.waiting(Outer(8, 4, 2), 1.0, 5.0), 20.0 / 8 - 1.0)

    def test_more_delay_steps_than_a_round(self):
        # The fragment is due again before its exchange is over: it is ended first.
        self.assertEqual(rare.waiting(Outer(4, 1, 100), 1.0, 3.0), 0.0)
        self.assertAlmostEqual(rare.waiting(Outer(4, 1, 100), 1.0, 6.0), 6.0 / 4 - 1.0)

    def test_what_the_thread_takes_of_the_core(self):
        self.assertAlmostEqual(rare.waiting(Outer(8, 1, 4), 1.0, 2.0, 0.5), 0.5 / 8)

    def step(self, outer, ranks=8, codec=Codec(), link=SLOW):
        return rare.step(one_bucket(1024), Cluster(ranks, link, algorithm="ring"), codec, [("sum", 1024)], outer)

    def test_by_hand(self):
        # 14 messages of 128 bytes, encoding and decoding, a tenth of it in a step.
        result = self.step(Outer(10), codec=Codec(1.0, ((8, 3.0),)))
        self.assertAlmostEqual(result.exposed, 14 * 0.25 / 10)
        self.assertAlmostEqual(result.total, 1.25 + (1.0 + 3.5 + 3.0) / 10)
        self.assertAlmostEqual(result.sent, 14 * 128 / 10)
        # In halves there are as many messages of half the bytes.
        self.assertAlmostEqual(self.step(Outer(10, 2)).exposed, 2 * 14 * (0.125 + 0.0625) / 10)
        # A local step is 1.25 s: of 3.5 s and 4 s of codec two of them hide 2.5.
        self.assertAlmostEqual(self.step(Outer(10, 1, 2), codec=Codec(1.0, ((8, 3.0),))).total, 1.25 + (7.5 - 2.5) / 10)

    def test_many_local_steps_compute_only(self):
        times = [self.step(Outer(steps)).total for steps in (1, 10, 100, 100_000)]
        self.assertEqual(times, sorted(times, reverse=True))
        self.assertAlmostEqual(times[-1], 1.25, places=4)

    def test_one_step_is_an_exchange_in_each(self):
        every = model.compressed(one_bucket(1024), Cluster(8, SLOW, algorithm="ring"), Codec(), [("sum", 1024)])
        self.assertAlmostEqual(self.step(Outer(1)).total, every.total)

    def test_rows(self):
        self.assertEqual(ROWS["rare"].local_steps, 16)
        cluster = Cluster(8, SLOW)
        of_row, same, more = (whole_step(System("rare", "dense"), cluster, outer=o) for o in (None, Outer(16), Outer(32)))
        self.assertEqual(of_row, same)
        self.assertAlmostEqual(more.exposed, same.exposed / 2)


class Servers(unittest.TestCase):
    def test_up_and_down(self):
        result = model.overlapped_servers(one_bucket(1024), Cluster(64, SLOW, "ps"))
        self.assertEqual((result.exposed, result.sent), (2 * (0.125 + 1.0), 1024))

    def test_parts_overlap(self):
        link = Link(float(model.PARTITION), 0.125)
        # Up from 1, 2, 3 to 4; down from 2.125 on, one after the other.
        result = model.overlapped_servers(one_bucket(3 * model.PARTITION), Cluster(2, link, "ps"))
        self.assertEqual(result.exposed, 1.0 + 0.125 + 3.0 + 0.125)

    def test_buckets_follow_without_waiting_for_what_comes_down(self):
        network = Network((Bucket(1024, 0.0), Bucket(1024, 0.0)), 1.0, 0.0)
        result = model.overlapped_servers(network, Cluster(8, SLOW, "ps"))
        self.assertEqual([e.end for e in result.timeline], [2.25, 3.25])

    def test_too_few(self):
        for servers, exposed in [(2, 2 * (0.125 + 4.0)), (99, 2.25)]:
            cluster = Cluster(8, SLOW, "ps", servers=servers)
            self.assertEqual(model.overlapped_servers(one_bucket(1024), cluster).exposed, exposed)


class Hierarchy(unittest.TestCase):
    inner = Link(4096.0, 0.0625)

    def cluster(self, ranks, **more):
        return Cluster(ranks, SLOW, "hierarchical", local=4, inner=self.inner, algorithm="ring", **more)

    def test_sum(self):
        # Within: 3 of 256 bytes, there and back. Between 2 hosts: halves of all 1024 bytes through one link, 2 times.
        inside, between = 2 * 3 * (0.0625 + 0.0625), 2 * (0.125 + 0.5)
        self.assertEqual(step_of(self.cluster(8)), inside + between)

    def test_one_host(self):
        self.assertEqual(step_of(self.cluster(4)), 2 * 3 * 0.125)
        self.assertEqual(step_of(self.cluster(2)), 2 * (0.0625 + 0.125))

    def test_gather(self):
        rounds = model.hierarchical_all_gather(256, 2, 4)
        wires = {False: model.Wire(SLOW), True: model.Wire(self.inner)}
        self.assertEqual(model.run(rounds, wires, 0.0), (0.125 + 1.0) + 3 * (0.0625 + 0.125))
        self.assertEqual(model.bytes_sent(rounds), 256 + 3 * 512)

    def test_ranks_of_a_host_send_and_work_together(self):
        wires = {False: model.Wire(Link(1e12, host=2.0**-10)), True: model.Wire(self.inner)}
        self.assertAlmostEqual(model.Rounds(1, 1024, sharers=4).once(wires, 0.0), 0.25)

    def test_no_part_of_a_host(self):
        with self.assertRaisesRegex(ValueError, "10 ranks are no whole number of hosts of 4"):
            self.cluster(10)


def step_of(cluster):
    return model.overlapped(one_bucket(1024), cluster).exposed


class Shaper(unittest.TestCase):
    def test_burst(self):
        wire = model.Wire(Link(16.0, burst=64.0))
        self.assertEqual(wire.send(0.0, 48), 0.0)
        self.assertEqual(wire.send(0.0, 48), 2.0)
        self.assertEqual(wire.send(3.0, 32), 4.0)
        self.assertEqual(wire.send(100.0, 80), 101.0)

    def test_burst_of_a_host_with_a_limit(self):
        wire = model.Wire(Link(16.0, host=1 / 32, burst=64.0))
        self.assertEqual(wire.send(0.0, 64), 2.0)  # 32 of them came back meanwhile
        self.assertEqual((wire.send(2.0, 96), wire.at), (9.0, 6.0))  # what came last is worked on from 6 on

    def test_equal_rounds_are_not_all_simulated(self):
        draw = random.Random(1)
        for _ in range(300):
            link = Link(draw.choice([10, 1e3]), draw.choice([0, 0.25, 2]), draw.choice([0, 0.02]),
                        burst=draw.choice([0, 5, 500]))
            rounds = Rounds(draw.randint(0, 40), draw.choice([1, 7, 300]))
            one, other = ({False: model.Wire(link)} for _ in range(2))
            clock = 0.0
            for _ in range(rounds.count):
                clock = rounds.once(other, clock)
            self.assertAlmostEqual(rounds.run(one, 0.0), clock, places=6)
            self.assertAlmostEqual(one[False].at, other[False].at, places=6)
            self.assertAlmostEqual(one[False].tokens, other[False].tokens, places=6)


# ------------------------------------------------------------------ files and the command line

LINK = {"kind": "link", "hosts": 2, "raw_goodput_mbit": 1000.0}


def invented(link=None, latency=2e-4):
    """Records in which everything is as the model has it."""
    link = dict(link or LINK)
    known = Link(link["raw_goodput_mbit"] * 1e6 / 8, latency, share=0.125)
    rows = [link]
    for size in [4096 << (2 * i) for i in range(7)]:
        for algorithm in ["ring", "recursive doubling"]:
            ms = 1e3 * model.all_reduce_time(algorithm, size, 2, known)
            rows.append({"kind": "allreduce", "algorithm": algorithm, "selected": False, "bytes": size, "ranks": 2, "ms": ms})
    for mode, compute, update, parts in [("dense", 400.0, 20.0, 11), ("hybrid", 250.0, 8.0, 4)]:
        size = round(WHOLE[mode].size)
        sizes = [size // parts] * (parts - 1) + [size - size // parts * (parts - 1)]
        buckets = [{"bytes": s, "ready_ms": compute * (i + 1) / parts} for i, s in enumerate(sizes)]
        of = {"mode": mode, "ranks": 2, "batch": 32}
        rows.append({"kind": "buckets", **of, "forward_ms": compute / 3, "backward_ms": compute * 2 / 3, "compute_ms": compute,
                     "update_ms": update, "buckets": buckets})
        network = Network(tuple(Bucket(b["bytes"], b["ready_ms"] / 1e3) for b in buckets), compute / 1e3, update / 1e3)
        for name, encode, decode in [("none", 0, 0), ("bf16", 0, 0), ("powersgd-r4", 30, 12), ("signum", 15, 9)]:
            system = System(systems.row_of(name), mode)
            codec, cluster = Codec(encode / 1e3, ((2, decode / 1e3),)), Cluster(2, known, early_update=True)
            result = systems.simulate(network, system, codec, cluster)
            rows.append({"kind": "step", "system": "ours", **of, "compressor": name, "compute_ms": compute, "encode_ms": encode,
                         "payload_bytes": systems.payload_bytes(system.name, mode, 2), "exposed_ms": 1e3 * result.exposed,
                         "thread_processor_ms": 0.125e3 * size / known.rate if name == "none" else 0.0,
                         "ms_per_step": 1e3 * result.total, "decode_ms": decode, "update_ms": update, "more": [1]})
    rows.append({"kind": "step", "system": "ddp", "mode": "dense", "compressor": "none", "ms_per_step": 1})
    return [*rows, {"kind": "testbed", "of": "no interest"}]


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, content, name="measured.json"):
        path = self.folder / name
        if isinstance(content, list):
            content = "".join(json.dumps(r) + "\n" for r in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def run_scaling(self, *words, status=0):
        codecs = [] if "--codecs" in words else ["--codecs", self.folder]  # no results of studies
        done = subprocess.run([sys.executable, str(ROOT / "bench" / "scaling"), *map(str, [*words, *codecs])], text=True, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def refused(self, content, says, *more):
        done = self.run_scaling("--measured", self.write(content), *more, status=1)
        self.assertRegex(done.stderr, says)
        self.assertEqual((done.stdout, len(done.stderr.splitlines())), ("", 1), done.stderr)

    def changed(self, kind, **fields):
        """The invented records, the first of a kind with other fields; None: without one."""
        rows = invented()
        row = next(r for r in rows if r["kind"] == kind)
        row.update(fields)
        for name in [n for n, v in row.items() if v is None]:
            del row[name]
        return rows

    # What is measured, back.

    def test_the_link_comes_back(self):
        groups = records.Measured([self.write(invented())]).groups
        fit = records.fit_link(groups[0])
        self.assertAlmostEqual(fit.link.latency / 2e-4, 1, delta=0.01)
        self.assertEqual([(r["algorithm"], r["bytes"]) for r in fit.rows], [("ring", 4096)])
        self.assertAlmostEqual(records.share_of(groups), 0.125)
        self.assertIsNone(records.fit_host(groups))

    def test_a_fast_link_tells_of_the_hosts(self):
        known = Link(2.5e9, 1e-5, host=8e-10)
        rows = [dict(LINK, raw_goodput_mbit=20000.0, round_trip_ms=0.02)]
        for size in [4096, 1 << 20, 1 << 24]:
            rows.append({"kind": "allreduce", "algorithm": "ring", "bytes": size,
                         "ms": 1e3 * model.all_reduce_time("ring", size, 2, known)})
        path = self.write(invented() + rows)
        groups = records.Measured([path]).groups
        host = records.fit_host(groups)
        self.assertAlmostEqual(host / 8e-10, 1, delta=0.01)
        self.assertEqual([r["bytes"] for r in records.fit_link(groups[1], host).rows], [4096, 1 << 24])
        out = self.run_scaling("--measured", path, "--validate").stdout
        self.assertIn("not among these, over links of 5 Gbit/s and more, where the hosts are the limit: 1 of 1 within", out)

    def test_validation_of_what_is_as_the_model_has_it(self):
        out = self.run_scaling("--measured", self.write(invented()), "--validate").stdout
        self.assertIn("all-reduces: 13 of 13 within 15 % (100 %)", out)
        self.assertIn("steps: 8 of 8 within 15 % (100 %)", out)
        self.assertIn("all: 21 of 21 within 15 % (100 %), median error 0.0 %", out)
        self.assertIn("all within 30 %: met", out)

    def test_validation_of_what_is_not(self):
        rows = invented()
        slow = next(r for r in rows if r["kind"] == "step" and r["compressor"] == "signum")
        slow["ms_per_step"] *= 2
        rows.append({"kind": "allreduce", "algorithm": "library", "bytes": 4096, "ranks": 2, "ms": 1.0})
        out = self.run_scaling("--measured", self.write(rows), "--validate").stdout
        self.assertIn("steps: 7 of 8 within 15 % (88 %)", out)
        self.assertIn("worst -50.0 % (2 hosts, 1000 Mbit/s, step, dense, Signum, 2 ranks)", out)
        self.assertIn("all within 30 %: missed", out)
        self.assertIn("left out: all-reduces called library", out)

    def test_each_link_has_its_rows(self):
        rows = invented() + invented(dict(LINK, raw_goodput_mbit=100.0), latency=1e-3)
        groups = records.Measured([self.write(rows)]).groups
        self.assertEqual([len(g.steps) for g in groups], [8, 8])
        out = self.run_scaling("--measured", self.write(rows), "--validate").stdout
        self.assertIn("all: 42 of 42", out)

    def test_rates_are_those_of_both_ways_and_bursts_those_of_tc(self):
        link = dict(LINK, both_ways_mbit=900.0, burst="256kb")
        group = records.Measured([self.write([link])]).groups[0]
        fit = records.fit_link(group)
        self.assertEqual((fit.link.rate, fit.link.burst, fit.rows), (900e6 / 8, 262144.0, []))

    def test_an_array_is_read_too(self):
        out = [self.run_scaling("--measured", self.write(text), "--json", "-", "--ranks", "8").stdout
               for text in (invented(), json.dumps(invented()))]
        self.assertEqual(out[0], out[1])

    def test_signum_decodes_every_rank(self):
        rows = invented()
        rows += [{"kind": "codec", "mode": "dense", "compressor": "signum", "ranks": p, "encode_ms": 5, "decode_ms": 3 + 2 * p}
                 for p in (2, 8, 32)]
        codec = records.Measured([self.write(rows)]).codec(records.Case(2, 32), "dense", "signum")
        self.assertAlmostEqual(codec.encode, 5e-3)
        self.assertAlmostEqual(codec.decode_for(128), 0.259)

    def test_delays_of_links(self):
        for text, delay in [("100ms", 0.1), ("500us", 5e-4), ("1.5s", 1.5), (None, 0.0)]:
            link = dict(LINK, delay=text, round_trip_ms=2e3 * delay + 0.4)
            group = records.Measured([self.write([link])]).groups[0]
            self.assertEqual(group.delay, delay)
            self.assertAlmostEqual(records.fit_link(group).link.latency, 2e-4)
        self.assertEqual(group.title, "2 hosts, 1000 Mbit/s")
        self.refused([dict(LINK, delay="soon")], "delay 'soon' is none")

    def test_times_of_the_study_are_preferred(self):
        rows = [{"mode": mode, "ranks": p, "encode_ms": 4.0, "decode_ms": 1.0 + p} for mode in ("dense", "hybrid") for p in (2, 8)]
        for name in ("signum", "efsign"):
            study_runs.write(self.folder / Timing(name).file, {"codecs": rows})
        measured = records.Measured([self.write(invented())], self.folder)
        for name in ("signum", "efsign"):
            codec = measured.codec(records.Case(2, 32), "hybrid", name)
            self.assertAlmostEqual(codec.encode, 4e-3)
            self.assertAlmostEqual(codec.decode_for(64), 65e-3)
        self.assertIsNone(measured.codec(records.Case(2, 32), "hybrid", "onebit"))
        self.assertEqual(measured.codec(records.Case(2, 32), "hybrid", "pactrain-0.5"), Codec())
        study_runs.write(self.folder / Timing("efsign").file, {"codec": 1})
        self.refused(invented(), "it has no `codecs`", "--codecs", self.folder)

    # Predictions.

    def predict(self, *words):
        """Of the rows with times of their own, unless others are named."""
        named = [] if "--systems" in words else ["--systems", *systems.SHORT]
        out = self.run_scaling("--measured", self.write(invented()), "--json", "-", *named, *words).stdout
        return [json.loads(line) for line in out.splitlines()]

    def test_all_systems(self):
        out = self.run_scaling("--measured", self.write(invented()), "--json", "-", "--ranks", "8,512",
                               "--rate", "1", "--delay", "100ms").stdout
        rows = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(len(rows), 2 * len(systems.systems()))
        self.assertEqual({(r["row"], r["mode"]) for r in rows}, {(s.name, s.mode) for s in systems.systems()})
        self.assertEqual({r["delay_ms"] for r in rows}, {100})
        codecs = {r["row"]: r["codec"] for r in rows}
        self.assertEqual([codecs[n] for n in ("none", "rare", "signum", "topk-0.1")], ["none", "none", "measured", "not measured"])

    def test_what_was_not_timed_is_the_least(self):
        out = self.run_scaling("--measured", self.write(invented()), "--ranks", "8", "--rate", "1").stdout
        self.assertIn("Not measured: encoding and decoding of PowerSGD, rank 1; ", out)
        self.assertRegex(out, r"\| dense \+ EF-sign \| >= [\d,]+ \(")
        self.assertNotRegex(out, r">= \*\*")
        self.assertIn("| dense + EF-sign | 1,396,972 | 9.8 | - | 400.0 | not measured |", out)

    def test_rare_exchanges(self):
        words = ["--systems", "rare", "--ranks", "8", "--rate", "1", "--delay", "100ms"]
        rows = {options: self.predict(*words, *options)[0] for options in [(), ("--local-steps", "16"), ("--local-steps", "160"),
                ("--local-steps", "160", "--outer-fragments", "4", "--outer-delay", "10")]}
        of_row, same, rarer, streamed = rows.values()
        self.assertEqual(of_row["exposed_ms"], same["exposed_ms"])
        self.assertAlmostEqual(rarer["exposed_ms"], same["exposed_ms"] / 10, places=3)
        self.assertLess(streamed["exposed_ms"], rarer["exposed_ms"])
        self.assertEqual((streamed["fragments"], streamed["delay_steps"]), (4, 10))
        self.assertEqual(streamed["system"], "dense + rare exchanges, H = 160, F = 4, D = 10")

    def predictor(self, **options):
        plain = {"batch": None, "latency_us": None, "host_ns": None, "share": None, "compute_scale": 1.0, "topology": "ring",
                 "systems": [*systems.SHORT, "rare"], "local_steps": None, "outer_fragments": 1, "outer_delay": 0, "delay": 0.0,
                 "window_kib": 15360.0, "inner_rate": 100.0, "inner_latency_us": 5.0, "ranks_per_host": 8, "servers": 0,
                 "algorithm": "best", "update": "early", "plan": "best", "by_bucket": False}
        return report.Predictor(records.Measured([self.write(invented())]), argparse.Namespace(**{**plain, **options}))

    def test_least_number_of_local_steps(self):
        for mode in ("dense", "hybrid"):
            steps, best, time = delays.least_steps(self.predictor(delay=0.1, local_steps=1), mode, 64, 1)
            found = [self.predictor(delay=0.1, local_steps=h).step(System("rare", mode), 64, 1)[0].total
                     for h in (steps, steps - 1)]
            self.assertLess(found[0], time)
            self.assertGreaterEqual(found[1], time)
            self.assertFalse(best.row.rare)

    def test_steps_on_the_test_bed(self):
        link = dict(LINK, rate_mbit=1000.0)
        rows = [*invented(link), *invented(dict(link, delay="100ms"))]
        next(r for r in reversed(rows) if r["kind"] == "step" and r["system"] == "ours" and r["mode"] == "hybrid"
             and r["compressor"] == "signum")["ms_per_step"] = 77.0
        measured, predictor = records.Measured([self.write(rows)]), self.predictor()
        of = {(name, delay): delays.step_on_test_bed(measured, predictor, System(name, "hybrid"), 2, 1, delay)
              for name in ("signum", "efsign") for delay in (0.0, 0.1, 0.05)}
        self.assertEqual((of["signum", 0.1], of["signum", 0.05], of["efsign", 0.1]), ("77 (4)", "-", "-"))
        self.assertGreater(int(of["signum", 0.0].split(" ")[0]), 200)

    def test_by_bucket(self):
        words = ["--systems", "signum", "--ranks", "2", "--rate", "0.1", "--plan", "measured"]
        after, during = self.predict(*words), self.predict(*words, "--by-bucket")
        self.assertEqual([(a["buckets"], d["buckets"]) for a, d in zip(after, during)], [(0, 11), (0, 4)])
        self.assertLess(during[0]["step_ms"], after[0]["step_ms"])

    def test_predictions(self):
        rows = self.predict("--ranks", "2,64", "--rate", "1,10")
        short = systems.systems(systems.SHORT)
        self.assertEqual((len(rows), {r["system"] for r in rows}), (2 * 2 * len(short), {s.title for s in short}))
        for r in rows:
            parts = sum(r[f"{n}_ms"] for n in ["compute", "encode", "exposed", "decode", "update"])
            self.assertAlmostEqual(parts, r["step_ms"], places=2)
            if r["system"] == "dense":
                self.assertEqual(r["speedup_over_dense"], 1.0)

    def test_every_topology_and_scale(self):
        for topology in ["ring", "ps", "hierarchical"]:
            rows = self.predict("--topology", topology, "--ranks", "8,4096", "--rate", "0.1,100")
            self.assertEqual(len(rows), 32)
        free = ["--ranks", "64", "--rate", "1000", "--latency-us", "0", "--share", "0"]
        whole, tenth = (self.predict("--compute-scale", x, *free) for x in ("1", "0.1"))
        for one, other in zip(whole, tenth):
            self.assertAlmostEqual(other["compute_ms"] / one["compute_ms"], 0.1, places=4)
            self.assertLess(other["step_ms"], 0.2 * one["step_ms"])

    def test_more_rate_never_hurts_and_more_ranks_never_help(self):
        rows = {(r["system"], r["ranks"], r["rate_gbit"]): r["step_ms"]
                for r in self.predict("--ranks", "8,32,128", "--rate", "0.1,1,10,100", "--plan", "measured")}
        for (system, ranks, rate), ms in rows.items():
            if (system, ranks, rate * 10) in rows:
                self.assertLessEqual(rows[system, ranks, rate * 10], ms)
            if (system, ranks * 4, rate) in rows:
                self.assertGreaterEqual(rows[system, ranks * 4, rate], ms)

    def test_text(self):
        out = self.run_scaling("--measured", self.write(invented()), "--ranks", "8,16", "--rate", "1").stdout
        self.assertIn("1 Gbit/s", out)
        self.assertIn("| system | 8 ranks | 16 ranks |", out)
        self.assertIn("From 2 measured ranks at batch 32 each: dense forward and backward 400.0 ms", out)
        out = self.run_scaling("--measured", self.write(invented()), "--ranks", "8", "--rate", "1").stdout
        self.assertIn("| Pufferfish | 13,344,552 | 23.4 |", out)

    def test_question(self):
        out = self.run_scaling("--measured", self.write(invented()), "--ask", "--ranks", "64", "--rate", "1").stdout
        self.assertRegex(out, r"^At 1 Gbit/s and 64 ranks a step takes [\d,]+ ms dense and [\d,]+ ms factorized: factorizing "
                              r"is worth it, \d\.\d\d times as fast \(computing alone: 1\.63\)")
        self.assertIn("Break-even with dense (", out)
        self.assertIn("Pufferfish is the faster at every rate.", out)
        self.assertRegex(out, r"Break-even with dense \+ PowerSGD, rank 4 \(\d+ ms here\): Pufferfish is the faster above [\d.]+ Mbit/s")

    def test_break_even_lies_where_both_take_as_long(self):
        out = self.run_scaling("--measured", self.write(invented()), "--ask", "--ranks", "16", "--rate", "1").stdout
        line = next(text for text in out.splitlines() if text.startswith("Break-even with dense + PowerSGD"))
        rate = float(line.split("above ")[1].split()[0]) / 1e3
        of = {r["system"]: r["step_ms"] for r in self.predict("--ranks", "16", "--rate", rate)}
        self.assertAlmostEqual(of["Pufferfish"] / of["dense + PowerSGD, rank 4"], 1, places=2)

    def test_a_hybrid_network_that_computes_longer_can_lose(self):
        rows = invented()
        for r in rows:
            if r["kind"] == "buckets" and r["mode"] == "hybrid":
                r["buckets"] = [dict(b, ready_ms=b["ready_ms"] * 2) for b in r["buckets"]]
                r["compute_ms"] *= 2
        out = self.run_scaling("--measured", self.write(rows), "--ask", "--ranks", "8", "--rate", "100").stdout
        self.assertIn("factorizing is not worth it", out)
        self.assertRegex(out, r"Break-even with dense \(\d+ ms here\): Pufferfish is the faster below [\d.]+ [GM]bit/s")

    def test_systems_of_other_topologies_are_left_out(self):
        out = self.run_scaling("--measured", self.write(invented()), "--topology", "ps", "--ranks", "8").stdout
        self.assertIn("Left out: dense + top-k, 1 %: parameter servers add gradients and count votes.", out)
        self.assertNotIn("| dense + top-k", out)

    def test_plot(self):
        path = self.folder / "p'lot.svg"
        words = ["--measured", self.write(invented()), "--ranks", "8,64", "--systems", *systems.SHORT, "--plot", path]
        if shutil.which("gnuplot") is None:
            self.assertIn("no gnuplot", self.run_scaling(*words, status=1).stderr)
            return
        self.run_scaling(*words)
        self.assertIn("Pufferfish + Signum", path.read_text(encoding="utf-8"))

    # What is refused: one line, exit status 1.

    def test_files_that_are_none(self):
        for words, says in [(["/nowhere/x"], "/nowhere/x: No such file"), ([self.folder], "Is a directory")]:
            done = self.run_scaling("--measured", *words, status=1)
            self.assertRegex(done.stderr, says)
            self.assertEqual(len(done.stderr.splitlines()), 1)
        for content, says in [("", "no buckets of both"), ("{", ":1: no JSON"), (b"\xff\xfe{}", "no UTF-8"),
                              ("[1]", "element 1: no JSON object"), ("{}\n3\n", ":2: no JSON object"),
                              ("[" * 100000, "no JSON"),
                              ('{"kind": "link", "raw_goodput_mbit": NaN}', ":1: no JSON: NaN is no number"),
                              ('{"kind": "link", "raw_goodput_mbit": ' + "9" * 5000 + "}", "no JSON|outside")]:
            self.refused(content, says)

    def test_records_that_are_none(self):
        for kind, fields, says in [
            ("link", {"raw_goodput_mbit": 0}, "raw_goodput_mbit 0 is outside"),
            ("link", {"raw_goodput_mbit": "fast"}, "needs a number for raw_goodput_mbit"),
            ("link", {"raw_goodput_mbit": True}, "needs a number"),
            ("link", {"raw_goodput_mbit": None}, "needs a number"),
            ("link", {"raw_goodput_mbit": 10**400}, "with too many digits is outside"),
            ("link", {"burst": "a lot"}, "burst 'a lot' is none"),
            ("link", {"hosts": 1.5}, "hosts 1.5 is no whole number"),
            ("allreduce", {"ms": 0}, "ms 0 is outside"),
            ("allreduce", {"bytes": -4}, "bytes -4 is outside"),
            ("allreduce", {"algorithm": 3}, "needs a text for algorithm"),
            ("buckets", {"mode": "sparse"}, "mode 'sparse' is neither dense nor hybrid"),
            ("buckets", {"buckets": []}, "needs a list of buckets"),
            ("buckets", {"buckets": 7}, "needs a list of buckets"),
            ("buckets", {"buckets": [7]}, "bucket 1 is no JSON object"),
            ("buckets", {"buckets": [{"bytes": 4}]}, "bucket 1: .*needs a number for ready_ms"),
            ("buckets", {"buckets": [{"bytes": 4, "ready_ms": 9e9}]}, "bucket 1: ready after 9e.09 ms, but the backward pass"),
            ("buckets", {"compute_ms": 0}, "compute_ms 0 is outside"),
            ("buckets", {"update_ms": None}, "needs a number for update_ms"),
            ("buckets", {"ranks": 0}, "ranks 0 is outside"),
            ("buckets", {"batch": 2}, "no buckets of both a dense and a hybrid network"),
            ("step", {"compressor": None}, "needs a text for compressor"),
            ("step", {"ms_per_step": -1}, "ms_per_step -1 is outside"),
            ("step", {"encode_ms": []}, "needs a number for encode_ms"),
        ]:
            with self.subTest(kind=kind, fields=fields):
                self.refused(self.changed(kind, **fields), says)

    def test_validation_refuses_other_payloads(self):
        self.refused(self.changed("step", payload_bytes=44_695_332), "payload of 44,695,332 bytes, but 44,695,336",
                     "--validate")

    def test_expected_payloads_may_differ(self):
        row = {"compressor": "atomo --compress-sparsity 2", "payload_bytes": 1_574_344}
        out = self.run_scaling("--measured", self.write(self.changed("step", mode="hybrid", **row)), "--validate").stdout
        self.assertIn("| step, hybrid, ATOMO, 2 singular triplets, 2 ranks |", out)
        self.refused(self.changed("step", mode="hybrid", **{**row, "payload_bytes": 5_000_000}), "by the model", "--validate")

    def test_other_compressors_are_left_out(self):
        for name in ["powersgd-rx", "powersgd-r0", "powersgd-r3", "huffman", "rare"]:
            out = self.run_scaling("--measured", self.write(self.changed("step", compressor=name)), "--validate").stdout
            self.assertIn(f"left out: steps with {name}", out)
            self.assertIn("steps: 7 of 7", out)

    def test_nothing_to_validate(self):
        done = self.run_scaling("--measured", self.write([LINK]), "--validate", status=1)
        self.assertIn("nothing to compare", done.stdout)

    def test_options(self):
        path = self.write(invented())
        for words in [["--ranks", "0"], ["--ranks", "8,x"], ["--rate", "-1"], ["--rate", "nan"], ["--compute-scale", "0"],
                      ["--ask"], ["--topology", "star"], ["--latency-us", "inf"], ["--share", "2"],
                      ["--ask", "--ranks", "8", "--rate", "5000"], ["--delay", "5"], ["--local-steps", "0"],
                      ["--outer-fragments", "2"], ["--systems", "zip"]]:
            self.run_scaling("--measured", path, *words, status=2)
        done = self.run_scaling("--measured", path, "--topology", "hierarchical", "--ranks", "12", status=1)
        self.assertIn("12 ranks are no whole number of hosts of 8", done.stderr)
        done = self.run_scaling("--measured", path, "--ranks", "8", "--json", "/nowhere/x", status=1)
        self.assertIn("/nowhere/x", done.stderr)


if __name__ == "__main__":
    unittest.main()
