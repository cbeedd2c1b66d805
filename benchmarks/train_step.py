"""A training step, compared with DistributedDataParallel, FSDP2 and torch.compile.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from _harness import Check, Result, environment, interleave, print_checks, print_table

# name in the table -> (name for _train_step.py, whether a launcher starts a process per rank)
OURS = {
    "local": ("local", False),
    "torchrun": ("torchrun", True),
    "jit": ("jit", False),
    "jit fully sharded": ("jit-cut", False),
    "replicated": ("replicated", False),
}
THEIRS = {"DDP": ("ddp", True), "DDP eager": ("ddp-eager", True), "FSDP2": ("fsdp2", True)}
ONE_PROCESS = {"jit": OURS["jit"], "one process": ("one-process", False)}
"""What ``--one-process`` compares: two devices, and one process with as many threads."""
OWN = ", own thread"
"""What the caller's thread computes in a step, besides waiting."""
BARS = {
    "local": {"DDP": 1.0},
    "torchrun": {"DDP": 1.0},
    "jit": {"DDP": 1.0, "local": 1.05},
    f"jit{OWN}": {"local": 1.0},
    "jit fully sharded": {"FSDP2": 1.0},
    "replicated": {"DDP eager": 1.0},
}
RANKS = 2
MODELS = {"MLP": 10, "GPT": 5, "digits": 10}
"""Steps in a round."""
TITLES = {
    "MLP": "MLP, 1.9 M weights, 256 rows: forward, backward, average, AdamW (per step)",
    "GPT": "GPT, 0.6 M weights, 32 x 64 characters: forward, backward, average, AdamW (per step)",
    "large MLP": "MLP, 5.8 M weights, 512 rows: the same (per step)",
    "digits": "convolutions, batch norms, 6,000 weights, 64 pictures: the same (per step)",
}


class Contender:
    """The processes of one contender, which wait for orders."""

    def __init__(self, name: str, is_launched: bool) -> None:
        self.loss = math.nan
        """Of the last step, over all ranks."""
        worker = str(Path(__file__).with_name("_train_step.py"))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        with Listener(("127.0.0.1", 0)) as listener:
            host, port = listener.address
            self._process = subprocess.Popen(
                [sys.executable, *(launcher if is_launched else []), worker, name],
                env={
                    **os.environ,
                    "TRAIN_STEP_ADDRESS": f"{host}:{port}",
                    "TORCHPMAP_DEVICE_TYPE": "cpu",  # whatever the host has
                    "OMP_NUM_THREADS": str(RANKS) if name == "one-process" else "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                },
            )
            self._ranks: list[Connection] = [
                listener.accept() for _ in range(RANKS if is_launched else 1)
            ]

    def ask(self, order: str | int) -> list[Any]:
        """Send an order to every rank, and wait for the answers."""
        for rank in self._ranks:
            rank.send(order)
        return [rank.recv() for rank in self._ranks]

    def do(self, steps: int) -> tuple[float, float]:
        """Run a number of steps; returns the seconds of the slowest rank, and those that its own
        thread has computed.
        """
        seconds, computed, losses = zip(*self.ask(steps), strict=True)
        self.loss = sum(losses) / len(losses)
        return max(seconds), max(computed)

    def end(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it may have failed
                rank.send(None)
                rank.close()
        self._process.wait()


@contextlib.contextmanager
def started(names: Mapping[str, tuple[str, bool]]) -> Iterator[dict[str, Contender]]:
    """The contenders, ended afterwards."""
    contenders: dict[str, Contender] = {}
    try:
        for label, (name, is_launched) in names.items():
            contenders[label] = Contender(name, is_launched)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.end()


def measure(models: Sequence[str], quick: bool) -> list[Result]:
    """Rounds of steps by all contenders in turn."""
    results: list[Result] = []
    with started(OURS | THEIRS) as contenders:
        for model in models:
            for contender in contenders.values():
                contender.ask(model)
            samples = {label: sample(contenders[label], MODELS[model]) for label in contenders}
            rounds, title = 5 if quick else 21, TITLES[model]
            total, own = interleave(title, RANKS, samples, rounds=rounds, unit="ms", warm_ups=2)
            # DDP's batch norms take the statistics of their own rows
            compared = OURS if model == "digits" else contenders
            insist_on_equal({label: contenders[label].loss for label in compared})
            results += [
                compared_with(total, label, ["local", *THEIRS] if label == "jit" else [*THEIRS])
                for label in OURS
            ]
            results.append(compared_with(own, "jit", ["local"], f"jit{OWN}"))
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return results


def measure_one_process(quick: bool) -> list[Result]:
    """Rounds of steps of the large perceptron: two devices, and one process with two threads."""
    model, steps = "large MLP", 3
    with started(ONE_PROCESS) as contenders:
        for contender in contenders.values():
            contender.ask(model)
        samples = {label: sample(contenders[label], steps) for label in contenders}
        rounds = 5 if quick else 21
        total, _ = interleave(TITLES[model], RANKS, samples, rounds=rounds, unit="ms", warm_ups=2)
        insist_on_equal({label: contender.loss for label, contender in contenders.items()})
    return [total]


def sample(contender: Contender, steps: int) -> Callable[[], dict[str, float]]:
    def measured() -> dict[str, float]:
        total, own = contender.do(steps)
        return {"total": total / steps, "own": own / steps}

    return measured


def compared_with(every: Result, label: str, others: Sequence[str], name: str = "") -> Result:
    """One contender and some others."""
    seconds = {each: every.seconds[each] for each in (label, *others)}
    return Result(every.section, name or label, RANKS, "ms", seconds)


def insist_on_equal(losses: Mapping[str, float]) -> None:
    """Raise unless all losses agree: contenders are compared only if they compute the same."""
    expected = next(iter(losses.values()))
    if not all(
        math.isclose(loss, expected, rel_tol=0.01, abs_tol=0.01) for loss in losses.values()
    ):
        raise RuntimeError(f"the contenders do not compute the same: losses {losses}")


def bars(results: Sequence[Result]) -> list[Check]:
    """What should hold on a quiet machine: as many steps per second as torch's own, or more, and
    in ``jit`` nearly as many as mapped.
    """
    names = {title: model for model, title in TITLES.items()}
    return [
        Check(f"{names[result.section]}, {result.metric}: time per step, x {rival}", ratio, bar)
        for result in results
        for rival, bar in BARS.get(result.metric, {}).items()
        for ratio in [result.ratio(rival)]
    ]


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, about a minute")
    parser.add_argument("--check", action="store_true", help="print PASS or FAIL for each bar")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--one-process", action="store_true", help="beside one process alone")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    at_start = environment()
    print(", ".join(f"{key} {value}" for key, value in at_start.items()))
    if at_start["load_average"] > 0.5:
        print("this machine is busy: trust ratios only, and measure again when it is quiet")
    if options.one_process:
        results = measure_one_process(options.quick)
    else:
        results = measure(options.only, options.quick)
    print_table(results)
    print("\nsteps per second")
    for result in results:
        others = list(result.seconds)[1:]
        rates = ", ".join(f"{1 / result.ratio(rival):.2f} x {rival}" for rival in others)
        print(f"  {result.section.split(',')[0]}, {result.metric}: {rates}")
    if options.check:
        print_checks(bars(results))
    if options.output:
        report = {
            "environment": at_start,
            "load_average_at_end": os.getloadavg()[0],
            "results": [result.to_json() for result in results],
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
