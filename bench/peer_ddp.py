#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""peer_ddp.py --rank R --ranks N --master ADDRESS --port PORT [--modes ...] [--hooks ...]

PyTorch's side of bench/testbed: training steps of ResNet-18 with DistributedDataParallel over gloo, dense and with the
architecture that factorizing makes, beside the same steps without exchange (no_sync), taking turns. Rank 0 prints a JSON
object a line. How it is tuned is the environment's business, and the choices below: channels last, gradients that are
views of the buckets, no broadcast of batch-norm statistics every step (ours has none either).
"""
import argparse
import contextlib
import datetime
import json
import math
import os
import statistics
import time

import peer_torch
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ["none", "fp16", "powersgd-r1", "powersgd-r2", "powersgd-r4"]
FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES
# The PowerSGD hook starts sums from call-backs. With several buckets these come in another order on every rank, and gloo
# mixes them up or ends the connection: so PowerSGD gets one bucket for everything.
ONE_BUCKET = 1024


class Candidate:
    """A network of its own below DistributedDataParallel, with a hook, or without exchange at all."""

    def __init__(self, mode, hook, bucket_mb, batch):
        training = peer_torch.Training("resnet18", mode, batch, "channels last")
        self.x, self.labels, self.loss, self.optimizer = training.x, training.labels, training.loss, training.optimizer
        self.parameters = training.parameters()
        self.hook, self.bucket_mb = hook, bucket_mb
        # How large DistributedDataParallel's first bucket may be.
        dist._DEFAULT_FIRST_BUCKET_BYTES = bucket_mb << 20 if bucket_mb == ONE_BUCKET else FIRST_BUCKET_BYTES
        self.net = DistributedDataParallel(training.net, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True,
                                           broadcast_buffers=False)
        self.state = None
        if hook == "fp16":
            self.net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook and hook.startswith("powersgd-r"):
            # The least start that it takes with error feedback and warm start.
            self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(hook.rpartition("r")[2]),
                                                     start_powerSGD_iter=2)
            self.net.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        self.rounds = []

    def step(self):
        """Milliseconds of the whole step, of forward and backward, of the optimizer."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if self.hook else self.net.no_sync():
            self.loss(self.net(self.x), self.labels).backward()
        computed = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return [1e3 * (end - start), 1e3 * (computed - start), 1e3 * (end - computed)]

    def payload_bytes(self):
        if self.state:
            _, _, compressed = self.state.compression_stats()
            return int(compressed * 4 / max(1, self.state.iter - self.state.start_powerSGD_iter))
        return self.parameters * (2 if self.hook == "fp16" else 4)


def slowest(rounds):
    """Columns of the slowest rank's times, step by step."""
    times = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.T.tolist()


def measure(mode, options):
    alone = Candidate(mode, None, 25, options.batch)
    candidates = [Candidate(mode, hook, bucket, options.batch) for hook in options.hooks
                  for bucket in ([ONE_BUCKET] if hook.startswith("powersgd") else options.bucket_mb)]
    warm_up = 0.0
    for candidate in [alone, *candidates]:
        # The second step cuts the buckets anew, the third is the first that PowerSGD compresses.
        for _ in range(4):
            warm_up = max(warm_up, candidate.step()[0] * 1e-3)
    agreed = torch.tensor([warm_up])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    runs = max(min(5, options.runs), min(options.runs, int(options.seconds / agreed.item())))
    for _ in range(runs):
        for candidate in [alone, *candidates]:
            candidate.rounds.append(candidate.step())
    compute = statistics.median(slowest(alone.rounds)[1])
    for candidate in candidates:
        total, _, update = slowest(candidate.rounds)
        middle, updating = statistics.median(total), statistics.median(update)
        if options.rank == 0:
            print(json.dumps({
                "kind": "step", "system": "ddp", "network": "resnet18", "mode": mode, "compressor": candidate.hook,
                "bucket_mb": candidate.bucket_mb, "ranks": options.ranks, "batch": options.batch,
                "threads": options.threads, "payload_bytes": candidate.payload_bytes(), "ms_per_step": round(middle, 3),
                "ms_p90": round(sorted(total)[math.ceil(0.9 * runs) - 1], 3), "ms_min": round(min(total), 3),
                "runs": runs, "compute_ms": round(compute, 3), "encode_ms": None,
                "exposed_ms": round(middle - compute - updating, 3), "decode_ms": None, "update_ms": round(updating, 3),
                "torch": torch.__version__}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--master", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--modes", nargs="+", choices=["dense", "hybrid"], default=["dense", "hybrid"])
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=["none", "fp16", "powersgd-r4"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[25], help="largest bucket; PyTorch's default is 25")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=30, help="timed steps of each kind, at most")
    parser.add_argument("--seconds", type=float, default=20, help="stop earlier: about so long for a hook (5 runs at least)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(MASTER_ADDR=options.master, MASTER_PORT=str(options.port))
    dist.init_process_group("gloo", rank=options.rank, world_size=options.ranks,
                            timeout=datetime.timedelta(seconds=120))
    for mode in options.modes:
        measure(mode, options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
