"""What the tests notice: mutations of the package, one at a time, and the test that fails first.

    python tests/mutants.py --count 40 --seed 25 --output kills.json
    python tests/mutants.py --again kills.json          # on this revision: does each still die?

A clone of HEAD is changed and tested. A mutation meets the files that name its module, and the
folder of its layer. Those that survive go through ``make test`` together, and through all cases of
their folders: what fails there is tried with each alone. A test kills if it fails with the mutation
twice, and not without it. A mutation that was judged to change nothing that a caller sees is left
out: ``"equivalent": "why"`` in the file, before ``--again``.
"""

import argparse
import ast
import copy
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu import REPORT, kill

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"_runtime": ["runtime", "faults"], "_transforms": ["transforms", "jit"]}
"""Folders of tests of a folder of the package, if not the one that is called like it."""
OPPOSITE: dict[type, type] = {
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add},
    **{ast.And: ast.Or, ast.Or: ast.And},
}
NEAREST = 3
"""Files of tests that a mutation meets alone."""
STAGES = ("its folder", "make test", "make test-all")
SURVIVED = "survived"
HANG_S = 200
"""A run in which no test has ended for so long hangs."""


@dataclass
class Mutant:
    """A change of some lines of a file, and what is known of it."""

    file: str
    line: int
    change: str
    old: str
    new: str
    killed_by: str = ""
    stage: str = ""
    seconds: float = 0
    equivalent: str = ""

    def applied(self, source: str) -> str | None:
        """The source with the change; None if the lines are not there, or not just once."""
        begin = sum(len(line) for line in source.splitlines(True)[: self.line - 1])
        if not source.startswith(self.old, begin):
            if source.count(self.old) != 1:
                return None
            begin = source.index(self.old)
        return source[:begin] + self.new + source[begin + len(self.old) :]

    def folders(self) -> list[str]:
        """The folders of tests of its layer."""
        layer = Path(self.file).parts[1]
        found = [f"tests/{name}" for name in FOLDERS.get(layer, [layer.strip("_")])]
        return [name for name in found if (ROOT / name).is_dir()] or ["tests/programs"]

    def nearest(self, tree: Path) -> list[str]:
        """Files of tests that name the module, those that do so most often first."""
        path = Path(self.file).relative_to("torchpmap").with_suffix("")
        names = f"{path}.py", "torchpmap." + ".".join(path.parts)
        mentions = {}
        for test in sorted((tree / "tests").glob("*/test_*.py")):
            text = test.read_text()
            mentions[str(test.relative_to(tree))] = (
                test.stem == f"test_{path.name.strip('_')}",
                sum(text.count(name) for name in names),
            )
        ranked = sorted(mentions, key=lambda test: mentions[test], reverse=True)
        return [test for test in ranked[:NEAREST] if any(mentions[test])]


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are run: neither annotations nor messages, which are in what is raised."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from evaluated(child)


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kinds of mutation that there are of a node, and what stands in its place."""
    new = copy.copy(node)
    match new:
        case ast.Compare(ops=[op]):
            new.ops = [OPPOSITE[type(op)]()]
            yield "comparison", ast.unparse(new)
        case ast.BoolOp(op=op):
            new.op = OPPOSITE[type(op)]()
            yield "and, or", ast.unparse(new)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            new.op = OPPOSITE[type(new.op)]()
            sequences = ast.List | ast.Tuple | ast.JoinedStr
            if not isinstance(new.left, sequences) and not isinstance(new.right, sequences):
                yield "sign", ast.unparse(new)
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "sign", ast.unparse(new.operand)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "number", str(1 - value if value in (0, 1) else value + 1)
        case ast.If(body=[ast.Raise()], orelse=[]):
            yield "check", "pass"
        case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(attr=name))):
            if name.strip("_").startswith("check"):
                yield "check", "pass"
        case ast.Call(ast.Attribute(value, "contiguous" | "clone" | "detach" | "copy")):
            yield "copy", ast.unparse(value)


def mutants_of(path: Path) -> Iterator[tuple[str, Mutant]]:
    """All mutations of a file, with their kinds."""
    source = path.read_text()
    lines = source.splitlines(True)
    for node in evaluated(ast.parse(source)):
        for kind, text in changes(node):
            was = ast.get_source_segment(source, node) or ""
            if was.startswith("elif"):
                continue
            assert isinstance(node, ast.expr | ast.stmt)
            first = node.lineno - 1
            old = "".join(lines[first : node.end_lineno])
            begin = len(lines[first].encode()[: node.col_offset].decode())
            new = text if kind == "check" else f"({text})"
            new = old[:begin] + new + old[begin + len(was) :]
            change = f"{' '.join(was.split())} → {text}"[:120]
            yield kind, Mutant(str(path.relative_to(ROOT)), first + 1, change, old, new)


def choose(count: int, seed: int) -> list[Mutant]:
    """Mutations of every folder, in proportion to its lines; all kinds are as frequent."""
    draw, lines = random.Random(seed), defaultdict[str, int](int)
    kinds: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "torchpmap").rglob("*.py")):
        folder = path.relative_to(ROOT).parts[1]
        lines[folder] += len(path.read_text().splitlines())
        for kind, mutant in mutants_of(path):
            kinds[folder][kind].append(mutant)
    chosen: list[Mutant] = []
    total = 0
    for folder, found in kinds.items():
        total += lines[folder]
        order = draw.sample(sorted(found), len(found))
        for k in range(round(count * total / sum(lines.values())) - len(chosen)):
            some = found[order[k % len(order)]]
            chosen.append(some.pop(draw.randrange(len(some))))
    return chosen


class Clone:
    """A clone of HEAD in a folder, changed and tested there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, path], check=True)

    def change(self, mutants: Sequence[Mutant]) -> bool:
        """Write the mutations; False if the lines of one are gone."""
        subprocess.run(["git", "checkout", "-q", "."], cwd=self.path, check=True)
        for mutant in sorted(mutants, key=lambda mutant: -mutant.line):
            path = self.path / mutant.file
            source = mutant.applied(path.read_text()) if path.exists() else None
            if source is None:
                return False
            path.write_text(source)
        return True

    def failing(self, targets: Sequence[str], everything: bool = False, *options: str) -> list[str]:
        """The tests that fail, or ``hang...`` or ``no start...``."""
        report, log = self.path / ".git/report", self.path / ".git/log"
        report.write_text("")
        own = {"PYTHONPATH": f"{self.path}:{self.path / 'tests'}", REPORT: str(report)}
        own |= {
            "PYTHONDONTWRITEBYTECODE": "",
            "TORCHPMAP_TEST_ALL": str(int(everything)),
            "TORCHPMAP_TEST_SCALE": "4",
        }
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "gpu", "-p", "no:cacheprovider"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *options, *targets],
                cwd=self.path,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                while process.poll() is None and time.time() - report.stat().st_mtime < HANG_S:
                    time.sleep(0.5)
                hangs, code = process.poll() is None, process.poll()
            finally:
                kill(process)
        tests = [json.loads(line) for line in report.read_text().splitlines()]
        failed = [test["test"] for test in tests if test["outcome"] == "failed"]
        if hangs:
            return [*failed, f"hang after {tests[-1]['test'] if tests else 'the start'}"]
        is_gone = code == 4 and "not found" in log.read_text()
        return failed or ([] if code in (0, 5) or is_gone else [f"no start of {targets[0]}"])


def meet_alone(mutant: Mutant, tree: Clone) -> None:
    """Try what killed it before, and the files of tests that name its module."""
    begin, before = time.monotonic(), mutant.killed_by
    is_there, mutant.killed_by = tree.change([mutant]), ""
    mutant.stage = SURVIVED if is_there else "gone"
    for targets in ([before] if before[:5] == "tests" else [], mutant.nearest(tree.path)):
        if is_there and targets and not mutant.killed_by:
            mutant.killed_by = next(iter(tree.failing(targets, False, "-x")), "")
            mutant.stage = "alone" if mutant.killed_by else SURVIVED
    mutant.seconds = round(time.monotonic() - begin)
    print(f"{mutant.file}:{mutant.line}", mutant.killed_by or mutant.stage, flush=True)


def meet_together(
    folder: str, met: list[Mutant], stage: str, tree: Clone, clean: Clone
) -> Iterator[None]:
    """Run a folder of tests with all of them, and what fails with each, until nothing fails."""
    everything = stage == STAGES[2]
    while (
        met and tree.change(met) and (failed := tree.failing([folder], everything, "--maxfail=4"))
    ):
        named = [test for test in failed if "::" in test]
        wrong = clean.failing(named, everything) if named else []
        for mutant in sorted(met, key=lambda mutant: folder not in mutant.folders()):
            tree.change([mutant])
            hit = tree.failing(named or [folder], everything, "-x")
            if {*hit} - {*wrong}:
                mutant.killed_by, mutant.stage = hit[0], stage
                print(f"{mutant.file}:{mutant.line}", mutant.killed_by, flush=True)
                yield
        if all(mutant.stage == SURVIVED for mutant in met):
            print("none of them alone fails", *failed, flush=True)
            break
        met = [mutant for mutant in met if mutant.stage == SURVIVED]


def run(mutants: Sequence[Mutant], tree: Clone, clean: Clone) -> Iterator[None]:
    """Find out what kills each; yields when more is known."""
    for mutant in mutants:
        meet_alone(mutant, tree)
        yield
    named = [mutant.killed_by for mutant in mutants if "::" in mutant.killed_by]
    wrong = clean.failing(named) if named else []
    for mutant in mutants:
        if mutant.killed_by in wrong:
            mutant.killed_by, mutant.stage = "", SURVIVED
    every = sorted(f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir())
    for stage, folder in itertools.product(STAGES, every):
        left = [mutant for mutant in mutants if mutant.stage == SURVIVED]
        met = [mutant for mutant in left if (folder in mutant.folders()) == (stage != STAGES[1])]
        yield from meet_together(folder, met, stage, tree, clean)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which mutations of the package the tests notice.")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="what is known, as JSON")
    parser.add_argument("--again", type=Path, help="the output of an earlier run")
    options = parser.parse_args()
    output = options.output or options.again or Path("kills.json")
    known = json.loads(options.again.read_text()) if options.again else []
    mutants = [Mutant(**each) for each in known] or choose(options.count, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        clones = Clone(Path(folder, "mutated")), Clone(Path(folder, "clean"))
        for _ in run([mutant for mutant in mutants if not mutant.equivalent], *clones):
            output.write_text(json.dumps([asdict(each) for each in mutants], indent=1) + "\n")
    print("| line | mutation | killed by | seconds |\n|---|---|---|---|")
    for each in mutants:
        fate = each.killed_by or (
            f"equivalent: {each.equivalent}" if each.equivalent else each.stage
        )
        print(f"| {each.file}:{each.line} | `{each.change}` | {fate} | {each.seconds:g} |")


if __name__ == "__main__":
    main()
