"""What the tests notice: mutations of the package, one at a time, and the first test that fails.

    python tests/mutants.py --count 40 --seed 25 --output kills.json
    python tests/mutants.py --again kills.json      # on this revision: does each still die?

In a clone of HEAD a mutation meets the files of tests that name its module, the tests of its layer,
``make test``, and all cases of its layer. One whose JSON says ``"equivalent": "why"`` meets none.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu import REPORT, kill

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"_runtime": ["runtime", "faults"], "_transforms": ["transforms", "jit"]}  # of tests
PAIRS = "Eq NotEq, Is IsNot, In NotIn, And Or, Lt LtE, Gt GtE, Add Sub"
NODES = [[getattr(ast, name) for name in pair.split()] for pair in PAIRS.split(", ")]
OTHER = dict(NODES) | {two: one for one, two in NODES}


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

    def write(self, tree: Path) -> bool:
        """Change the tree; False if the lines are not in it, or not just once."""
        path = tree / self.file
        source = path.read_text() if path.exists() else ""
        begin = sum(len(line) for line in source.splitlines(True)[: self.line - 1])
        if not source.startswith(self.old, begin):  # the lines have moved
            begin = source.find(self.old) if source.count(self.old) == 1 else -1
        new = source[:begin] + self.new + source[begin + len(self.old) :]
        return begin >= 0 and path.write_text(new) > 0

    def stages(self, tree: Path) -> Iterator[tuple[str, list[str]]]:
        """What meets it in turn."""
        path = Path(self.file).relative_to("torchpmap").with_suffix("")
        named, module = f"test_{path.name.strip('_')}.py", ".".join(("torchpmap", *path.parts))
        tests = sorted(tree.glob("tests/*/test_*.py"), key=lambda test: test.name != named)
        near = [test for test in tests if re.search(f"{path}.py|{module}\\b", test.read_text())]
        names = FOLDERS.get(path.parts[0], [path.parts[0].strip("_")])
        own = [f"tests/{name}" for name in names if (tree / "tests" / name).is_dir()]
        yield "the same test", [self.killed_by]
        yield "its files", [str(test.relative_to(tree)) for test in near[:3]]
        yield "its folder", own
        yield "make test", ["tests"]
        yield "make test-all", own or ["tests/programs"]


def evaluated(node: ast.AST) -> Iterator[Any]:
    """The nodes that are run: neither annotations nor messages, which are in what is raised."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                yield from evaluated(child) if isinstance(child, ast.AST) else ()


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kinds of mutation that there are of a node, and what stands in its place."""
    new = copy.copy(node)
    match new:
        case ast.Compare(ops=[op]):
            new.ops = [OTHER[type(op)]()]
            yield "comparison", ast.unparse(new)
        case ast.BoolOp(op=op):
            new.op = OTHER[type(op)]()
            yield "and, or", ast.unparse(new)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            new.op = OTHER[type(op)]()
            if not any(isinstance(x, ast.List | ast.Tuple | ast.JoinedStr) for x in (left, right)):
                yield "sign", ast.unparse(new)
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "sign", ast.unparse(new.operand)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "number", str(1 - value if value in (0, 1) else value + 1)
        case ast.If(body=[ast.Raise()], orelse=[]):
            yield "check", "pass"
        case ast.Expr(ast.Call(ast.Name(x) | ast.Attribute(_, x))) if x.strip("_")[:5] == "check":
            yield "check", "pass"
        case ast.Call(ast.Attribute(value, "contiguous" | "clone" | "detach" | "copy")):
            yield "copy", ast.unparse(value)


def mutants_of(path: Path) -> Iterator[tuple[str, Mutant]]:
    """All mutations of a file, with their kinds."""
    source = path.read_text()
    for node in evaluated(ast.parse(source)):
        for kind, text in changes(node):
            was = ast.get_source_segment(source, node) or ""
            old = "".join(source.splitlines(True)[node.lineno - 1 : node.end_lineno])
            begin = len(old.encode()[: node.col_offset].decode())
            new = old[:begin] + (text if kind == "check" else f"({text})") + old[begin + len(was) :]
            change = f"{' '.join(was.split())} -> {text}"[:120]
            if not was.startswith("elif"):
                yield kind, Mutant(str(path.relative_to(ROOT)), node.lineno, change, old, new)


def choose(count: int, seed: int) -> list[Mutant]:
    """Mutations of every folder, in proportion to its lines; all kinds are as frequent."""
    draw, lines = random.Random(seed), defaultdict[str, int](int)
    kinds: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "torchpmap").rglob("*.py")):
        folder = path.relative_to(ROOT).parts[1]
        lines[folder] += len(path.read_text().splitlines())
        for kind, mutant in mutants_of(path):
            kinds[folder][kind].append(mutant)
    chosen, total = list[Mutant](), 0
    for folder, found in kinds.items():
        total += lines[folder]
        order = draw.sample(sorted(found), len(found)) * count
        while len(chosen) < round(count * total / sum(lines.values())):
            some = found[order.pop(0)]
            chosen.append(some.pop(draw.randrange(len(some))))
    return chosen


def first_failure(tree: Path, targets: Sequence[str], stage: str) -> str:
    """The test that fails; or that the run hangs, or does not start."""
    (report := tree / ".git/report").write_text("")
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-pgpu", *targets]
    env = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tests'}", REPORT: str(report)}
    env |= {"TORCHPMAP_TEST_ALL": "01"[stage == "make test-all"], "TORCHPMAP_TEST_SCALE": "4"}
    out = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=tree, env=env, stdout=out, start_new_session=True)
    try:
        while (code := process.poll()) is None and time.time() - report.stat().st_mtime < 200:
            time.sleep(0.5)
    finally:
        kill(process)
    ended = [json.loads(line) for line in report.read_text().splitlines()]
    if code in (0, 5) or (code == 4 and "::" in targets[0]):  # 4: there is no such test
        return ""
    if ended and ended[-1]["outcome"] == "failed":
        return str(ended[-1]["test"])
    return "a hang" if code is None else f"{targets[0]} ends with {code}"


def meet(mutant: Mutant, tree: Path) -> None:
    """Find out what kills it."""
    begin, stages = time.monotonic(), list(mutant.stages(tree))
    mutant.killed_by, mutant.stage = "", "gone"
    while not mutant.killed_by and stages and mutant.write(tree):
        (mutant.stage, targets), *stages = stages
        test = first_failure(tree, targets, mutant.stage) if any(targets) else ""
        subprocess.run(["git", "checkout", "-q", "."], cwd=tree, check=True)
        again = [test] if "::" in test else targets
        if test and not first_failure(tree, again, mutant.stage):
            mutant.killed_by = test
    mutant.seconds = round(time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which mutations of the package the tests notice.")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="the output of an earlier run")
    parser.add_argument("--output", type=Path, default=Path("kills.json"))
    options = parser.parse_args()
    known = json.loads(options.again.read_text()) if options.again else []
    mutants = [Mutant(**each) for each in known] or choose(options.count, options.seed)
    with tempfile.TemporaryDirectory() as tree:
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, tree], check=True)
        for one in mutants:
            if not one.equivalent:
                meet(one, Path(tree))
            fate = one.equivalent or one.killed_by or f"nothing ({one.stage})"
            print(one.file, one.line, one.change, fate, one.seconds, sep=" | ", flush=True)
            options.output.write_text(json.dumps([asdict(each) for each in mutants], indent=1))


if __name__ == "__main__":
    main()
