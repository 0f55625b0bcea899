#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""delay_relay.py --rate BITS --delay SECONDS --limit BYTES NAMESPACE=ADDRESS ...

Links with a rate and a delay between network namespaces, in user space, for kernels without netem (sch_netem). bench/testbed
starts this program. Every namespace has a TUN device eth0, which ADDRESS belongs to (`Relay.create_device` makes one). This
process reads the IPv4 packets that a host sends and writes them to the destination's device after the time that the links
need (class Switch). It runs with real-time priority where the kernel permits that, because the hosts' programs may occupy all
cores.

Devices exchange TCP segments of up to 64 kB that are not cut into frames (virtio-net header with segmentation and checksum
offload), so that 1 Gbit/s needs a few thousand packets a second. The link's rate nevertheless counts the Ethernet frames of
1500 bytes into which a network card would cut the segment.

Commands come from standard input, answers go to standard output, one line each: "ready" at the start; for each line "report"
one JSON object (class Counts) about the time since the previous report; the same at the end of standard input, which ends the
program with status 0. Any other end is an error.
"""
import argparse
import contextlib
import ctypes
import fcntl
import gc
import heapq
import ipaddress
import json
import math
import os
import pathlib
import select
import struct
import subprocess
import sys
import tempfile
import time

DEVICE = "eth0"
VIRTIO = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
WHOLE, ECN = 0, 0x80  # gso_type: no segmentation; a flag beside the type
ETHERNET = 14  # bytes of a frame's header, as tc counts them
LARGEST = 65536 + VIRTIO.size  # bytes that one read returns at most
SMALLEST_LIMIT = 128 << 10  # a queue has room for the largest packet
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN = 0x1, 0x2, 0x8
AT_ONCE = 16  # packets read from a device before other devices and deliveries have their turn


class RelayError(Exception):
    """The relay cannot start, or has ended before it was told to."""


# ---- scheduling

class Switch:
    """Times at which packets leave a switch with one cable to each host. A cable carries `rate` bytes a second each way.

    A host's cable carries its packets one after the other: a packet of s bytes that the host sends at t has left the host at
        sent = max(t, sent of the host's previous packet) + s / rate.
    The switch forwards a packet while it still arrives (cut-through). The packet is at the receiving host at
        received = max(sent, received of that host's previous packet + s / rate),
    later than sent only if several hosts send to this one, and is delivered at received + delay. Packets are handled at the
    receiving host's cable in the order of `sent`.

    A packet is dropped if more than `limit` - s bytes wait for the sending host's cable at t, or for the receiving host's
    cable at sent. Bytes under way (rate x delay) do not count.
    """

    def __init__(self, hosts, rate, delay, limit):
        self.rate, self.delay, self.limit = rate, delay, limit
        self.sent, self.received = [-math.inf] * hosts, [-math.inf] * hosts
        self.events, self.entered = [], 0  # heap of (time, order of entry, whether received, target, size, packet)

    def has_room(self, busy_until, now, size):
        return max(0.0, busy_until - now) * self.rate + size <= self.limit

    def send(self, now, source, target, size, packet):
        """A host sends a packet now. False: it is dropped."""
        if not self.has_room(self.sent[source], now, size):
            return False
        self.sent[source] = max(now, self.sent[source]) + size / self.rate
        self.entered += 1
        heapq.heappush(self.events, (self.sent[source], self.entered, False, target, size, packet))
        return True

    def next_time(self):
        """When `deliver` is to be called next; infinite if no packet is under way."""
        return self.events[0][0] if self.events else math.inf

    def deliver(self, now):
        """Yields (time, target, size, packet) for everything due until now, in order of time; packet None if it was dropped."""
        while self.events and self.events[0][0] <= now:
            at, order, is_received, target, size, packet = heapq.heappop(self.events)
            if is_received:
                yield at, target, size, packet
            elif self.has_room(self.received[target], at, size):
                self.received[target] = max(at, self.received[target] + size / self.rate)
                heapq.heappush(self.events, (self.received[target] + self.delay, order, True, target, size, packet))
            else:
                yield at, target, size, None


def wire_bytes(packet):
    """Bytes of the Ethernet frames of an IPv4 packet with its virtio-net header. A TCP segment that awaits segmentation counts
    as its frames: each has a copy of the headers and `gso_size` bytes of payload."""
    _, kind, _, payload, _, _ = VIRTIO.unpack_from(packet)
    length = len(packet) - VIRTIO.size
    if kind & ~ECN == WHOLE:
        return length + ETHERNET
    network = 4 * (packet[VIRTIO.size] & 15)
    headers = network + 4 * (packet[VIRTIO.size + network + 12] >> 4)
    frames = math.ceil((length - headers) / payload)
    return length + (frames - 1) * headers + frames * ETHERNET


def destination(packet):
    """The four bytes of an IPv4 packet's destination; None of anything else."""
    start = VIRTIO.size
    return packet[start + 16:start + 20] if len(packet) >= start + 20 and packet[start] >> 4 == 4 else None


# ---- the process

class Counts:
    """What a report says."""

    def __init__(self, priority):
        self.priority, self.started, self.cpu = priority, time.monotonic(), time.process_time()
        self.packets = self.bytes = self.dropped_sending = self.dropped_receiving = self.ignored = 0
        self.late, self.latest = 0.0, 0.0

    def line(self):
        passed = time.monotonic() - self.started
        return json.dumps({
            "seconds": round(passed, 3), "cpu_percent": round(100 * (time.process_time() - self.cpu) / passed, 2),
            "priority": self.priority, "packets": self.packets, "wire_bytes": self.bytes,
            "dropped_sending": self.dropped_sending, "dropped_receiving": self.dropped_receiving,
            "ignored": self.ignored,  # packets to no host, as multicast
            "late_us_mean": round(1e6 * self.late / max(1, self.packets), 1), "late_us_max": round(1e6 * self.latest, 1)})


def attach(namespace):
    """The TUN device of this namespace; the process stays in the namespace."""
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO_ECN)
    return device


def take_priority():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return "real-time"
    except PermissionError:
        return "normal"


def read_packets(device):
    with contextlib.suppress(BlockingIOError):
        for _ in range(AT_ONCE):
            yield os.read(device, LARGEST)


def relay(devices, hosts, switch, counts):
    """Moves packets until standard input ends. devices: {file: number of the host}; hosts: {four bytes: number}."""
    files = {number: device for device, number in devices.items()}
    while True:
        wait = max(0.0, switch.next_time() - time.monotonic())
        readable, _, _ = select.select([*devices, 0], [], [], None if math.isinf(wait) else wait)
        for device in readable:
            if device == 0:
                told = os.read(0, 4096)
                for _ in range(max(1, told.count(b"\n"))):
                    print(counts.line(), flush=True)
                counts = Counts(counts.priority)
                if not told:
                    return
                continue
            for packet in read_packets(device):
                target = hosts.get(destination(packet))
                if target is None:
                    counts.ignored += 1
                elif not switch.send(time.monotonic(), devices[device], target, wire_bytes(packet), packet):
                    counts.dropped_sending += 1
        now = time.monotonic()
        for at, target, size, packet in switch.deliver(now):
            if packet is None:
                counts.dropped_receiving += 1
                continue
            os.write(files[target], packet)
            counts.packets += 1
            counts.bytes += size
            counts.late += now - at
            counts.latest = max(counts.latest, now - at)


def positive(text):
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"not above 0: {text}")
    return float(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=positive, required=True, help="bits a second of each host's cable, each way")
    parser.add_argument("--delay", type=positive, required=True, help="seconds, one way")
    parser.add_argument("--limit", type=int, required=True, help="bytes that wait for a cable at most")
    parser.add_argument("hosts", nargs="+", metavar="NAMESPACE=ADDRESS")
    a = parser.parse_args()
    if a.limit < SMALLEST_LIMIT:
        parser.error(f"--limit: at least {SMALLEST_LIMIT} bytes")
    names, addresses = zip(*(host.split("=", 1) for host in a.hosts))
    devices = {attach(name): number for number, name in enumerate(names)}
    hosts = {ipaddress.IPv4Address(address).packed: number for number, address in enumerate(addresses)}
    gc.disable()  # no cycles are made, and a collection would be a pause
    counts = Counts(take_priority())
    print("ready", flush=True)
    relay(devices, hosts, Switch(len(names), a.rate / 8, a.delay, a.limit), counts)


# ---- for the program that starts it

class Relay:
    """The running process. It lives in the last namespace, so that the removal of the namespace's processes ends it too."""

    PATIENCE = 10  # seconds for an answer

    @staticmethod
    def create_device(run, namespace):
        """Makes the TUN device; `run` is called with the words of each command."""
        run("ip", "-n", namespace, "tuntap", "add", "dev", DEVICE, "mode", "tun", "vnet_hdr")
        # Without an address of IPv6 the kernel sends no messages of its own. A full queue drops packets, so it is long.
        run("ip", "-n", namespace, "link", "set", DEVICE, "mtu", "1500", "txqueuelen", "10000", "addrgenmode", "none")

    def __init__(self, hosts, rate, delay, limit):
        """hosts: {namespace: address}; rate in bits a second, delay in seconds, limit in bytes."""
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, pathlib.Path(__file__).resolve(), "--rate", str(rate), "--delay", str(delay), "--limit",
             str(limit), *(f"{name}={address}" for name, address in hosts.items())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, bufsize=0, start_new_session=True)
        try:
            self.answer()
        except BaseException:
            self.end()
            raise

    def why_ended(self):
        """A text if the process has ended; None while it runs."""
        if (status := self.process.poll()) is None:
            return None
        self.errors.seek(0)
        told = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"the relay ended with status {status}" + (f": {told[-1]}" if told else "")

    def answer(self):
        if not select.select([self.process.stdout], [], [], self.PATIENCE)[0]:
            raise RelayError(f"no answer from the relay in {self.PATIENCE} s")
        line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.PATIENCE)
            raise RelayError(self.why_ended() or "the relay closed its output")
        return line

    def report(self):
        """Counts since the previous report."""
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self.process.stdin.write(b"report\n")
        return json.loads(self.answer())

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(self.PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


if __name__ == "__main__":
    main()
