"""Run random programs in all modes against a reference, until the time is over.

    python tests/programs/fuzz.py --seconds 600 --seed 7

A program is written down smaller than it was found, as a script that can be pasted.  The reference
(``_fuzz_reference``) is plain torch, row by row, and knows nothing of torchpmap.
"""

import argparse
import faulthandler
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TORCHPMAP_DEVICE_TYPE", "cpu")

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _fuzz_generate import generated
from _fuzz_modes import MODES, Failure, applies, script, trial
from _fuzz_programs import Program
from _fuzz_shrink import shrink
from _support import SCALE

import torchpmap as tp

HANG_S = 200.0


def fuzz(options: argparse.Namespace) -> int:
    """Run programs; the number of those that are wrong in a way not seen before."""
    end = time.monotonic() + options.seconds
    runs: Counter[str] = Counter()
    known: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    programs = 0
    start, stop = ("\r", "") if sys.stdout.isatty() else ("", "\n")
    while programs < options.programs and time.monotonic() < end:
        seed = f"{options.seed}:{options.first + programs}"
        faulthandler.dump_traceback_later(HANG_S * SCALE, exit=True)
        if sys.stdout.isatty() or programs % 100 == 0:
            print(f"{start}{programs} programs, seed {seed}   ", end=stop, flush=True)
        program, expected = generated(seed)
        for mode in options.mode:
            failure = trial(program, mode, expected)
            runs[mode] += applies(program, mode)
            if failure is not None and failure.is_known:
                known[mode] += 1
            elif failure is not None:
                kinds[failure.kind] += 1
                if kinds[failure.kind] == 1:
                    report(seed, program, failure, options)
        programs += 1
    faulthandler.cancel_dump_traceback_later()
    print(f"{start}{programs} programs; runs {dict(runs)}, of them refused {dict(known)}")
    print(f"failures: {sum(kinds.values())}")
    for kind, number in kinds.most_common():
        print(f"{number:6} {kind}")
    return len(kinds)


def report(seed: str, program: Program, failure: Failure, options: argparse.Namespace) -> None:
    """Print a failing program, made as small as there is time for."""

    def fails(candidate: Program) -> bool:
        faulthandler.dump_traceback_later(HANG_S * SCALE, exit=True)
        try:
            again = trial(candidate, failure.mode)
        except NameError:  # of the reference: a step that another one needs is gone
            return False
        return again is not None and again.kind == failure.kind

    print(f"\n{'=' * 80}\nseed {seed}, mode {failure.mode}: {failure.kind}\n", flush=True)
    small = shrink(program, fails, options.shrink)
    last = trial(small, failure.mode)
    print(script(small, failure.mode, options.devices))
    comment = (last or failure).text
    print("".join(f"# {line}\n" for line in comment.splitlines()[:30]), flush=True)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--programs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds per failure")
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=MODES,
        default=["graph", "uncompiled", "inline", "serial"],
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = arguments(sys.argv[1:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tp.init(num_devices=given.devices)
    found = fuzz(given)
    tp.shutdown()
    sys.exit(bool(found))
