# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes docs/results/scaling.md, with its plots and predictions beside it."""
import shlex

import scaling_systems as systems
from scaling_delays import delays, keep, rare_exchanges, with_options
from scaling_records import BadInput
from scaling_report import SHOWN, Predictor, answer, breakdown, break_even, plot, tables, validate

FEW = [8, 64, 512, 4096]  # ranks
QUESTION = (64, 1)  # ranks, Gbit/s
FREE = {"host_ns": 0.0, "share": 0.0}
VARIANTS = [("As measured", {}),
            ("Hosts to which moving bytes costs nothing (network cards that do it alone)", FREE),
            ("Such hosts, and computing ten times as fast", {"compute_scale": 0.1, **FREE}),
            ("Such hosts, and computing a hundred times as fast", {"compute_scale": 0.01, **FREE})]

MODEL = """\
With a message's latency a, the delay d of a link, its rate R and p ranks, a message of m bytes takes a + d + m / R. At most
15 MiB of a message are under way (256 pieces of 60 KiB, `distributed/collectives/message_stream.hpp`): a longer one waits
d - 15300 KiB / R for each further 15 MiB, if that is above zero. Hosts' time for a byte comes on top.

| collective | messages, one after the other | used by |
|---|---|---|
| sum of n bytes by a ring | 2 (p - 1) of n / p bytes | gradients, PowerSGD, random-k |
| sum of n bytes by recursive doubling | log2 p of n bytes, two more if p is no power of two | the same, where it is faster |
| sum of 16-bit numbers, n bytes as sent | 2 x (p - 1) of n / p bytes, p - 1 at once | bf16, fp16 |
| gather of blocks of b bytes | (p - 1) of b bytes | top-k, signs, QSGD, TernGrad, DGC |
| the same, lengths not known before | ceil(log2 p) of a few bytes first | ATOMO |
| two hops | (p - 1) of a stripe's code at once, (p - 1) of the owner's code | Signum by two hops, DoubleSqueeze |

Gradients that overlap with the backward pass (none, bf16, fp16, PacTrain, Powerfish after the switch) travel bucket by bucket: a
bucket starts when its gradients are complete and the bucket before it has arrived. A compressor adds encoding, its collectives and
decoding to a step; with `--by-bucket` it works during the backward pass, and takes time of the computing's core. With rare
exchanges of H local steps of L seconds, F fragments and D delay steps, where a fragment takes X, a step takes L + F X / H if D = 0,
else L + F max(0, X - D L) / H, or F X / H if the thread cannot keep up; the thread's share of the core comes on top. Bytes are
those of `bench/compressor_bytes.py`."""

LEFT_OUT = """\
- Ranks are alike and start together: no stragglers, no jitter, no lost packets, no other traffic. The network between the
  hosts is never the bottleneck, only each host's own link, and a message's latency is the same however many ranks there are.
- The exchange shares the computing's core, as on the test bed: what its thread takes of it was measured there beside the
  steps, and slows the backward pass down; it sleeps while it waits for a delay. No host moves bytes faster than the hosts here
  did over a link without a limit, one thread and the kernel's TCP, however fast the link, and it computes nothing meanwhile. A core to spare and network
  cards that move bytes alone are the other end: `--share 0 --host-ns 0`. The test bed itself has no links where that matters.
- TCP's own windows, its slow start after a pause, and losses: with delays they can make links slower than their rate. At 1 Gbit/s
  and 100 ms each way 25 MB are to be under way, more than Linux lets a connection have by default.
- The outer optimizer's pass over the parameters, and the exchange at the end of each epoch. With `--local-steps-power 1` H falls
  with the learning rate.
- Loading of data, the batch-norm statistics' averaging before an evaluation, checkpoints, the switch itself.
- Accuracy. Steps are compared, not what a step achieves: compressors change the gradients, rare exchanges the steps, PacTrain
  the network.
- The library has the ring, recursive doubling, the direct exchange of narrow values, the ring all-gather and two hops. Hierarchical
  sums and parameter servers are predictions of what it does not have: parameter servers as BytePS has them, parts of at most
  4,096,000 bytes spread over as many servers as ranks, up and down at once, every part added when all have sent it; without
  BytePS's priorities, which start the next forward pass before all parts are back.
- Buckets may be put together where that is faster (`--plan best`, limits of 8, 16 and 32 MiB and one bucket for all): many
  ranks want large messages. They are never cut smaller than they were measured.
- With compressors nothing overlaps, as in the library by default: they start when the backward pass is over.
- PacTrain's remaining weights are spread evenly over the buckets, the fragments of rare exchanges are equally long, and of a
  compressor that works bucket by bucket each bucket's share is that of its size.
- Signum's all-gather is a ring of whole blocks; with 4096 ranks each holds 5.7 GB of votes of the dense network."""


def head(measured, a, predictor):
    shown = ["bench/scaling --measured", *(shlex.quote(str(p)) for p in a.measured)]
    if a.latency_us is not None:
        shown.append(f"--latency-us {a.latency_us:g}")
    return ["<!-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception -->",
            "<!-- Written by bench/scaling --page; the predictions are those of scaling/*.json. -->",
            "# Scaling: is factorizing worth it?", "",
            "What a training step of ResNet-18 (CIFAR-10) would take on more ranks than there are here, over links of any "
            "rate: predictions, not measurements. [The model against the test bed](#the-model-against-the-test-bed) has its "
            "errors: nearly all all-reduces are within 15 % of the measurement, about half of the steps are, and steps with a "
            "delay of 100 ms are the worst. `bench/scaling` simulates one rank's step event by event: buckets of "
            "gradients become ready as measured, the exchange serves them in order, each collective as its own messages, "
            "with what the compressors take as measured; [the model](#the-model) has the formulas. The systems are those of "
            "`bench/compressors`; plots and the tables of many links have eight of them. What was measured comes from "
            "`bench/testbed` ([exchange.md](exchange.md) says under which conditions) and from `bench_compressors`"
            + (f", on {'; '.join(measured.machines)}" if measured.machines else "") + ". Before a step of a compressor that has not "
            "been timed stands >=: its encoding and decoding come on top.", "",
            *(line + "\n" for line in predictor.premises()),
            "A faster device moves everything: its step is shorter, so the same link is slower in comparison. `--compute-scale "
            "0.1` is a device that computes, encodes and decodes ten times as fast as what was measured here.", "",
            "```sh", " \\\n  ".join(shown) + " \\\n  --page docs/results/scaling.md",
            f"bench/scaling --measured ... --ask --ranks {QUESTION[0]} --rate {QUESTION[1]:g}", "```", ""]


def gains(measured, a, rates):
    """How many times as fast Pufferfish is as dense, on hosts of several kinds."""
    lines = ["## Pufferfish against dense", "",
             "How many times as fast a step is. In brackets the fastest of the eight systems, where it is another.", ""]
    for title, changes in VARIANTS:
        predictor = Predictor(measured, with_options(a, **changes))
        lines += [f"{title}:", "", "| ranks | " + " | ".join(f"{r:g} Gbit/s" for r in rates) + " |",
                  "|---:|" + "---:|" * len(rates)]
        for ranks in FEW:
            cells = []
            for rate in rates:
                times = {s: predictor.step(s, ranks, rate)[0].total for s in predictor.systems}
                best = min(times, key=times.get)
                gain = f"{times[systems.DENSE] / times[systems.PUFFERFISH]:.2f}"
                cells.append(gain if best == systems.PUFFERFISH else f"{gain} ({best.title})")
            lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def break_evens(measured, a):
    lines = ["## Where Pufferfish breaks even", "",
             "Rates at which a step of Pufferfish, in fp32, is the faster one (tried from 1 Mbit/s to 1000 Gbit/s).", ""]
    for title, changes in VARIANTS:
        predictor = Predictor(measured, with_options(a, **changes))
        lines += [f"{title}:", "", "| against | " + " | ".join(f"{r} ranks" for r in FEW) + " |", "|---|" + "---|" * len(FEW)]
        for other in predictor.systems:
            if other != systems.PUFFERFISH:
                words = [break_even(predictor, systems.PUFFERFISH, other, ranks) for ranks in FEW]
                lines.append(f"| {other.title} | " + " | ".join(words) + " |")
        lines.append("")
    return lines


def topology(measured, a, name, folder):
    predictor = Predictor(measured, with_options(a, topology=name))
    rows = list(predictor.rows(a.ranks, a.rate))
    keep(rows, folder / f"{name}.json")
    plot(rows, folder / f"{name}.svg")
    title = SHOWN[name][0].upper() + SHOWN[name][1:]
    lines = [f"## {title}", "", predictor.premises()[1], "",
             f"![milliseconds a step over the ranks]({folder.name}/{name}.svg)", ""]
    shown = rows if name == "ring" else [r for r in rows if r["ranks"] in FEW]
    return lines + ["Milliseconds a step (times faster than dense); the least is bold.", "",
                    *tables(shown)]


def write_page(measured, a):
    page = a.page
    folder = page.with_suffix("")
    short, predictor = with_options(a, systems=list(systems.SHORT)), Predictor(measured, a)
    untimed = [s.title for s in predictor.untimed if s.name in systems.SHORT]
    if predictor.missing or untimed:
        raise BadInput(f"a page wants {'; '.join([*predictor.missing, *(f'times of {title}' for title in sorted(untimed))])}")
    folder.mkdir(parents=True, exist_ok=True)
    ranks, rate = QUESTION
    rows = list(predictor.rows([ranks], [rate]))
    lines = head(measured, a, predictor)
    lines += ["> " + " ".join(answer(Predictor(measured, short), ranks, rate)[:3]), "",
              f"All systems at {rate:g} Gbit/s and {ranks} ranks, in milliseconds:", "", *breakdown(rows)]
    lines += gains(measured, short, a.rate) + break_evens(measured, short)
    lines += delays(measured, a, folder) + rare_exchanges(measured, a, folder)
    for name in SHOWN:
        lines += topology(measured, short, name, folder)
    checked, compared, _ = validate(measured)
    lines += ["## The model against the test bed", "",
              "Every all-reduce and step of ours that was measured beside what the model says of it. A link's rate is its "
              "measured goodput; the latency of a message comes from its smallest ring, the hosts' time for a byte from the largest "
              "ring over the fastest link; rows that were used so are not compared. Of a step computing, encoding, decoding "
              "and the update are as measured in the same run; their order, their overlap with the messages and the waiting "
              "that remains are the model's. The share of a core that waiting takes is that of the steps over other links, "
              "where there are any, measured by the thread's own clock. The bound is the exposed time over the same link "
              "if messages had no latency and hosts took no time for them.", "",
              *(checked if compared else ["No test bed's rows are in these files."]), ""]
    lines += ["## The model", "", MODEL, "", "## What the model leaves out", "", LEFT_OUT, ""]
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
