"""Run by tests/checkpoint/test_checkpoint.py: saves that are killed, each at another moment.

A child is forked for every moment.  It replaces the checkpoint and ends itself at the k-th file
operation in the folder; then the parent loads what is there.  Host values only: no pool to fork.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import torchpmap as tp

folder = Path(sys.argv[1])
EVENTS = {"open", "os.rename", "os.mkdir", "os.scandir", "shutil.rmtree"}
REMOVALS = {"os.rmdir", "os.remove"}  # their paths are relative to an open folder
seen: list[str] = []


def tree(value: float) -> dict:
    return {"w": torch.full((1000,), value), "step": int(value)}


def kill_at(moment: int) -> None:
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        in_folder = event in EVENTS and str(folder) in str(args[0])
        if in_folder or event in REMOVALS:
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


def loaded(path: Path) -> float:
    found = tp.checkpoint.load(path)
    (value,) = set(found["w"].tolist())  # not half of each
    assert found["step"] == value
    assert tp.checkpoint.latest(folder) == path
    return value


path = folder / "step_1"
tp.checkpoint.save(path, tree(0.0))
good, moment, was_killed = 0.0, 0, True
while was_killed:
    child = os.fork()
    if child == 0:
        kill_at(moment)
        tp.checkpoint.save(path, tree(good + 1))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    was_killed = os.WIFSIGNALED(status)
    assert was_killed or status == 0, status
    value = loaded(path)
    assert value in (good, good + 1), (value, good)
    seen.append("old" if value == good else "new")
    good, moment = value, moment + 1
assert seen[0] == "old"
assert seen[-1] == "new"
assert os.listdir(folder) == ["step_1"], os.listdir(folder)
print(moment, "moments;", seen.count("old"), "old;", seen.count("new"), "new")
