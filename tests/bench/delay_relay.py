#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The relay of bench/testbed --delay: its schedule against a plain computation, and links between real namespaces.

The latter are left out where there is no root, no iproute2 or no TUN device.
"""
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTBED = ROOT / "bench" / "testbed"
RELAY = ROOT / "bench" / "delay_relay.py"
sys.path.insert(0, str(ROOT / "bench"))
import delay_relay  # noqa: E402
from delay_relay import Switch, destination, wire_bytes  # noqa: E402

NO_LIMIT = 1 << 40


def delivered(switch, packets):
    """[(time, target, number)] of all packets, each a (time, source, target, size), delivered whenever something is due; a
    dropped packet has time None."""
    results = []

    def deliver_until(now):
        while switch.next_time() <= now:
            results.extend((at if packet is not None else None, target, packet)
                           for at, target, _, packet in switch.deliver(switch.next_time()))

    for number, (at, source, target, size) in enumerate(packets):
        deliver_until(at)
        if not switch.send(at, source, target, size, number):
            results.append((None, target, number))
    deliver_until(sys.float_info.max)
    return results


def plain(packets, hosts, rate, delay):
    """{number: time}, of cables that never drop: first all senders' cables, then all receivers', then the delay."""
    sent, busy = [], [0.0] * hosts
    for number, (at, source, target, size) in enumerate(packets):
        busy[source] = max(at, busy[source]) + size / rate
        sent.append((busy[source], number, target, size))
    times, busy = {}, [0.0] * hosts
    for at, number, target, size in sorted(sent):
        busy[target] = max(at, busy[target] + size / rate)
        times[number] = busy[target] + delay
    return times


class Schedule(unittest.TestCase):
    def times(self, packets, hosts=3, rate=1000, delay=10, limit=NO_LIMIT):
        return {number: at for at, _, number in delivered(Switch(hosts, rate, delay, limit), packets)}

    def test_by_hand(self):
        # 500 bytes take half a second, 1000 one second; the delay is 10 seconds.
        self.assertEqual(self.times([(5.0, 0, 1, 500)]), {0: 15.5})
        # One sender: the second packet waits for the first one. A pause leaves no credit.
        self.assertEqual(self.times([(0.0, 0, 1, 1000), (0.5, 0, 2, 1000), (9.0, 0, 1, 1000)]), {0: 11.0, 1: 12.0, 2: 20.0})
        # Both directions at once do not wait for each other.
        self.assertEqual(self.times([(0.0, 0, 1, 1000), (0.0, 1, 0, 1000)]), {0: 11.0, 1: 11.0})
        # Two senders and one receiver: its cable carries one packet after the other.
        self.assertEqual(self.times([(0.0, 0, 2, 1000), (0.25, 1, 2, 1000)]), {0: 11.0, 1: 12.0})

    def test_against_a_plain_computation(self):
        for seed in range(20):
            generator = random.Random(seed)
            hosts, now, packets = generator.choice([2, 3, 5]), 0.0, []
            for _ in range(300):
                now += generator.expovariate(1.0)
                source, target = generator.sample(range(hosts), 2)
                packets.append((now, source, target, generator.choice([80, 1514, 64000])))
            rate, delay = 15e3 * generator.uniform(0.5, 4), generator.uniform(0.1, 30)
            results, expected = delivered(Switch(hosts, rate, delay, NO_LIMIT), packets), plain(packets, hosts, rate, delay)
            self.assertEqual(len(results), len(packets))
            for at, target, number in results:
                self.assertAlmostEqual(at, expected[number], delta=1e-6)
                self.assertEqual(target, packets[number][2])
            self.assertEqual([at for at, _, _ in results], sorted(at for at, _, _ in results))

    def test_rate_of_a_full_link(self):
        packets = [(0.0, 0, 1, 1500)] * 1000
        self.assertAlmostEqual(max(self.times(packets, rate=125e3, delay=0.1).values()), 0.1 + 1000 * 1500 / 125e3, delta=1e-6)

    def test_queues_are_limited(self):
        # At 0 four packets: the last would make 4000 bytes wait. At 0.5, 2500 wait and 500 more fit.
        times = self.times([(0.0, 0, 1, 1000)] * 4 + [(0.5, 0, 1, 501), (0.5, 0, 1, 500)], limit=3000)
        self.assertEqual(times, {0: 11.0, 1: 12.0, 2: 13.0, 3: None, 4: None, 5: 13.5})
        # 25 senders, each with room on its own cable. The first packet passes the receiver's cable, three wait for it, the
        # others are dropped.
        times = self.times([(0.0, source, 0, 1000) for source in range(1, 26)], hosts=26, limit=3000)
        self.assertEqual([at for at in times.values() if at is not None], [11.0, 12.0, 13.0, 14.0])
        # What is under way is no queue: the delay holds 10 seconds of the rate, more than the limit.
        times = self.times([(float(second), 0, 1, 1000) for second in range(50)], limit=1000)
        self.assertEqual(list(times.values()), [11.0 + second for second in range(50)])


def tcp_packet(payload, kind=0, segment=0):
    network = bytes([0x45, *bytes(15), 10, 88, 0, 2])
    transport = bytearray(32)  # with 12 bytes of options
    transport[12] = 8 << 4
    return struct.pack("=BBHHHH", 0, kind, 0, segment, 0, 0) + network + transport + bytes(payload)


class Packets(unittest.TestCase):
    def test_bytes_of_the_frames(self):
        self.assertEqual(wire_bytes(tcp_packet(1000)), 14 + 52 + 1000)
        for kind in (1, 0x81):  # TCP over IPv4, without and with congestion notification
            self.assertEqual(wire_bytes(tcp_packet(44 * 1448, kind, 1448)), 44 * 1514)
            self.assertEqual(wire_bytes(tcp_packet(2 * 1448 + 1, kind, 1448)), 2 * 1514 + 14 + 52 + 1)

    def test_destination(self):
        self.assertEqual(destination(tcp_packet(0)), bytes([10, 88, 0, 2]))
        six = bytearray(tcp_packet(0))
        six[10] = 0x60
        self.assertIsNone(destination(bytes(six)))
        self.assertIsNone(destination(tcp_packet(0)[:29]))


def run(*words):
    return subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                          timeout=60)


def namespaces():
    return [line.split()[0] for line in run("ip", "netns", "list").stdout.splitlines()]


def why_no_relay():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return "no root or no iproute2"
    name = f"pufferfish-trial-{os.getpid()}"
    if run("ip", "netns", "add", name).returncode != 0:
        return "no network namespaces here"
    made = run("ip", "-n", name, "tuntap", "add", "dev", "eth0", "mode", "tun", "vnet_hdr")
    run("ip", "netns", "delete", name)
    return f"no TUN device: {made.stdout.strip()}" if made.returncode != 0 else None


class Links(unittest.TestCase):
    """Bounds leave room for a busy machine, but not for a link without the delay or without the rate."""

    @classmethod
    def setUpClass(cls):
        if why := why_no_relay():
            raise unittest.SkipTest(why)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="pufferfish-relay-test-")
        self.addCleanup(folder.cleanup)
        self.json = pathlib.Path(folder.name) / "link.json"

    def start(self, *more):
        process = subprocess.Popen([TESTBED, "--only", "link", "--no-build", "--json", self.json, "--delay-by", "relay",
                                    *map(str, more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def relay_of(self, process):
        """The relay's process id, when it runs."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
                try:
                    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if str(RELAY).encode() in words and any(f"-{process.pid}-0=".encode() in word for word in words):
                    return pid
            time.sleep(0.05)
        return self.fail("no relay")

    def expect_nothing_left(self, process, relay=None):
        self.assertEqual([n for n in namespaces() if n.startswith(f"pufferfish-testbed-{process.pid}-")], [])
        if relay:
            self.assertFalse(pathlib.Path(f"/proc/{relay}").exists())

    def link(self, *words):
        """The record of the link's measurement."""
        process = self.start(*words)
        told = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, told)
        self.expect_nothing_left(process)
        link = json.loads(self.json.read_text(encoding="utf-8").splitlines()[1])
        self.assertEqual((link["kind"], link["delay_by"], link["burst"]), ("link", "relay", "0b"))
        self.assertIn("by relay\nrelay: ", told[0])
        return link

    def test_delay_and_rate(self):
        link = self.link("--hosts", 2, "--rate", "20mbit", "--delay", "20ms", "--link-seconds", 1.5, "--limit", "64mb")
        self.assertTrue(40 <= link["round_trip_ms"] < 60, link)
        # Frames have 1448 bytes of payload and 66 of headers: at most 95.6 % of the rate.
        self.assertTrue(8 < link["raw_goodput_mbit"] <= 19.5, link)
        self.assertTrue(4 < link["both_ways_mbit"] <= 19.5, link)
        counts = link["relay"]
        self.assertEqual((counts["dropped_sending"], counts["dropped_receiving"]), (0, 0))
        self.assertGreater(counts["wire_bytes"], 4 * 1e6 * link["raw_goodput_mbit"] / 8)  # four transfers of a second each
        self.assertLess(counts["late_us_mean"], 5000)
        self.assertTrue(0 < counts["cpu_percent"] < 90, counts)

    def test_more_hosts_and_a_higher_rate(self):
        link = self.link("--hosts", 3, "--rate", "200mbit", "--delay", "3ms", "--link-seconds", 0.6, "--limit", "64mb")
        self.assertTrue(6 <= link["round_trip_ms"] < 20, link)
        self.assertTrue(60 < link["raw_goodput_mbit"] <= 195, link)

    def test_a_small_queue_drops(self):
        link = self.link("--hosts", 2, "--rate", "10mbit", "--delay", "50ms", "--link-seconds", 1, "--limit", "128kb")
        self.assertEqual(link["limit"], "128kb")
        self.assertTrue(100 <= link["round_trip_ms"] < 140, link)
        self.assertGreater(link["relay"]["dropped_sending"], 0)

    def test_refusals(self):
        for limit in ["127kb", "some"]:
            process = self.start("--delay", "1ms", "--limit", limit)
            told = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 1, told)
            self.assertIn(f"--limit {limit}: the relay needs at least 128kb", told[1])
            self.expect_nothing_left(process)

    def test_a_dead_relay_ends_the_run(self):
        process = self.start("--delay", "5ms", "--rate", "10mbit", "--link-seconds", 40)
        relay = self.relay_of(process)
        time.sleep(0.5)
        os.kill(relay, signal.SIGKILL)
        begin = time.monotonic()
        told = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 1, told)
        self.assertIn("the relay ended with status -9", told[1])
        self.assertLess(time.monotonic() - begin, 15)
        self.expect_nothing_left(process, relay)
        self.assertFalse(self.json.exists())

    def test_interrupted(self):
        process = self.start("--hosts", 3, "--delay", "5ms", "--rate", "10mbit", "--link-seconds", 40)
        relay = self.relay_of(process)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130, told)
        self.expect_nothing_left(process, relay)

    def test_a_killed_test_bed_leaves_no_relay(self):
        process = self.start("--delay", "5ms", "--rate", "10mbit", "--link-seconds", 40)
        relay = self.relay_of(process)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        end = time.monotonic() + 15
        while pathlib.Path(f"/proc/{relay}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(run(TESTBED, "--clean").returncode, 0)
        self.expect_nothing_left(process, relay)


class Process(unittest.TestCase):
    def test_refusals(self):
        for words, told in [([], "required"),
                            (["--rate", "0", "--delay", "1", "--limit", "999999", "a=10.0.0.1"], "not above 0"),
                            (["--rate", "1", "--delay", "1", "--limit", "9", "a=10.0.0.1"], "--limit: at least")]:
            done = run(sys.executable, RELAY, *words)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(told, done.stdout)

    def test_a_relay_that_cannot_start(self):
        with self.assertRaisesRegex(delay_relay.RelayError, "the relay ended with status 1: .*no-such-namespace"):
            delay_relay.Relay({"no-such-namespace": "10.0.0.1"}, 1e6, 0.1, 1 << 20)


if __name__ == "__main__":
    unittest.main()
