"""What the sections share: where results go, sizes, and the device of this process."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _harness import Result, interleave

import torchpmap as tp

EAGER = {"backend": "eager"}
TAIL = 4000
"""Characters of a traceback that are kept."""


@dataclass(frozen=True)
class Bench:
    """One section that runs in this process."""

    section: str
    journal: Path
    """A line of JSON per result, written at once: a section may be killed."""
    device_type: str

    @property
    def is_small(self) -> bool:
        """Whether no GPU is there, so that only the scripts are tested."""
        return self.device_type == "cpu"

    def sized(self, large: Any, small: Any) -> Any:
        """The value for a GPU, or the one for a test of this script."""
        return small if self.is_small else large

    @property
    def compile(self) -> Any:
        """What mapped functions are compiled with."""
        return self.sized(True, EAGER)

    @property
    def device(self) -> torch.device:
        """The device that plain torch uses in this process."""
        return torch.device(self.sized("cuda", "cpu"))

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function under plain ``torch.compile``."""
        return torch.compile(function, **self.sized(options, {"backend": "eager"}))

    def synchronize(self) -> None:
        """Wait for what plain torch does in this process."""
        if not self.is_small:
            torch.cuda.synchronize()

    def write(self, **line: Any) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps({"section": self.section, **line}) + "\n")

    def number(self, name: str, value: float | None, unit: str) -> None:
        """Write down one number."""
        self.write(name=name, value=value, unit=unit)

    def check(self, name: str, passed: object, detail: object = "") -> None:
        """Write down whether something is as it must be."""
        self.write(name=name, passed=bool(passed), detail=str(detail)[:TAIL])

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """An exception in the block is written down, and the section goes on behind it."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self.check(name, False, f"{type(error).__name__}: {error}\n{text[-TAIL // 2 :]}")
        self.write(name=name, took=round(time.perf_counter() - begin, 2))

    def compare(
        self,
        title: str,
        contenders: Mapping[str, Callable[[], Mapping[str, float]]],
        rounds: int,
        unit: str = "us",
    ) -> list[Result]:
        """Time contenders in turn, and write down the medians."""
        rounds = self.sized(rounds, 2)
        found = interleave(title, None, contenders, rounds=rounds, unit=unit)
        for result in found:
            self.write(
                name=f"{title}: {result.metric}",
                unit=unit,
                median_s={name: result.median(name) for name in result.seconds},
                rounds_s=result.seconds,
            )
        return found


def timed(function: Callable[[], Any], times: int = 1) -> float:
    """Seconds per call."""
    begin = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - begin) / times


def near(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Whether values agree, relative to the largest."""
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        one, other = (x.detach().cpu().to(torch.complex128) for x in (one, other))
        if one.shape != other.shape:
            return False
        if not (one - other).abs().max() <= tolerance * max(1.0, other.abs().max().item()):
            return False
    return True


def leaves(tree: Any) -> Sequence[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def on_worker(function: Callable[[], Sequence[float]]) -> list[float]:
    """What a function, called on every worker, gives on the first."""
    ask = tp.pmap(lambda _: torch.tensor(list(function()), dtype=torch.float64), compile=False)
    return ask(torch.zeros(tp.local_device_count())).cpu()[0].tolist()
