"""``python -m torchpmap doctor``, ``bench``, ``replay FILE`` and ``convert OLD NEW``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(given: Sequence[str] | None = None) -> int:
    """The exit status: 1 if something does not work."""
    parser = argparse.ArgumentParser(prog="python -m torchpmap", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what this machine is, and whether all works on it")
    bench = commands.add_parser("bench", help="how fast calls, collectives and copies are here")
    for command in (doctor, bench):
        command.add_argument("--json", action="store_true", help="for a bug report")
        command.add_argument("--num-devices", type=int, help="default: as in a program")
        command.add_argument("--device-type", help="default: as in a program")
    replay = commands.add_parser("replay", help="a recorded call again, on the CPU")
    replay.add_argument("file", help="what torchpmap.debug.record has written")
    replay.add_argument("--at", help="stop in pdb at a line (train.py:12) or an operation (log_1)")
    replay.add_argument("--against", metavar="FILE", help="the first difference from another call")
    replay.add_argument("--dtype", help="... from the same in another dtype: float64")
    replay.add_argument("--backend", help="... from the same compiled: inductor")
    convert = commands.add_parser("convert", help="a checkpoint of torchpmap 0.1, for this release")
    convert.add_argument("old", help="the folder that torchpmap 0.1 has saved")
    convert.add_argument("new", help="a folder to save to")
    options = parser.parse_args(given)
    if options.command in ("replay", "convert"):
        return (_replay if options.command == "replay" else _convert)(options)
    import torchpmap as tp

    try:
        for name in ("num_devices", "device_type"):
            if (value := getattr(options, name)) is not None:
                setattr(tp.config, name, value)
    except ValueError as error:
        parser.error(str(error))
    return (_doctor if options.command == "doctor" else _bench)(as_json=options.json)


def _doctor(*, as_json: bool) -> int:
    from torchpmap._doctor import facts, findings, report, selftest

    found = facts.collect()
    wrong = findings.findings(found)
    is_text = not as_json and facts.is_first()
    if is_text:
        print(*report.described(found), "", "self-test", sep="\n", flush=True)
    steps = []
    for step in selftest.run():
        steps.append(step)
        if is_text:
            print(report.described_step(step), flush=True)
    if as_json and facts.is_first():
        found["torch"] = {"collect_env": facts.of_torch()}
        print(json.dumps(report.as_json(found, wrong, steps), indent=2))
    elif is_text:
        print("", *report.described_findings(wrong, steps), sep="\n")
    failed = any(step.error for step in steps)
    return int(failed or any(each.level == "problem" for each in wrong))


def _bench(*, as_json: bool) -> int:
    from torchpmap import PmapError
    from torchpmap._doctor import bench, facts

    is_first = facts.is_first()
    try:
        rows = bench.run(print if is_first and not as_json else None)
    except (ValueError, PmapError) as error:
        print(error, file=sys.stderr)
        return 1
    if as_json and is_first:
        print(json.dumps(rows, indent=2))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from pathlib import Path

    from torchpmap import CheckpointError
    from torchpmap._doctor.convert import convert

    try:
        convert(Path(options.old), Path(options.new))
    except (OSError, ValueError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _replay(options: argparse.Namespace) -> int:
    import torch

    from torchpmap.debug import replay

    try:
        found = replay(options.file, at=options.at)
        print(found)
        given = {name: getattr(options, name) for name in ("against", "dtype", "backend")}
        for name, value in given.items():
            if value is not None:
                other = getattr(torch, value, value) if name == "dtype" else value
                result = found.bisect(**{name: other})
                print(f"first difference, {name} {value}: {result or 'none'}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
