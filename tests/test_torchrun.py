"""Covers: the runtime of processes that a launcher started, with 2 and 4 ranks on this host.

The cases and what they must give are in ``_torchrun_cases.py``; each number of ranks is one job
that runs them all, and every case is a test that looks at what its ranks got.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _launched import TESTS, Raised, answers, launch
from _torchrun_cases import CASES, GRAPH, Case

import torchpmap as tp

RANKS = [2, 4]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Number of ranks -> what each rank got, by case."""
    known: dict[int, list[dict[str, Any]]] = {}

    def of(num_ranks: int) -> list[dict[str, Any]]:
        if num_ranks not in known:
            folder: Path = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            finished = launch(num_ranks, str(TESTS / "_torchrun_cases.py"), str(folder))
            assert finished.code == 0, finished.output
            known[num_ranks] = answers(num_ranks, folder)
        return known[num_ranks]

    return of


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_case(results, name, num_ranks):
    case: Case = CASES[name]
    for rank, got in enumerate(results(num_ranks)):
        check(got[name], case.expected(rank, num_ranks), f"rank {rank}")


def check(got: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Raised):
        assert isinstance(got, Raised), f"{where}: {got!r}"
        assert got.kind == expected.kind, f"{where}: {got}"
        assert expected.text in got.text, f"{where}: {got}"
    elif isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: {got!r}"
        torch.testing.assert_close(got, expected, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected), f"{where}: {got!r}"
        assert len(got) == len(expected), f"{where}: {got!r}"
        for place, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
            check(mine, wanted, f"{where}[{place}]")
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), f"{where}: {got!r}"
        for key, wanted in expected.items():
            check(got[key], wanted, f"{where}[{key!r}]")
    else:
        assert got == expected, where


@pytest.mark.parametrize("num_ranks", RANKS)
def test_random_numbers_are_those_of_a_single_controller(results, pool, num_ranks):
    torch.manual_seed(7)
    expected = tp.pmap(lambda x: torch.rand(2) + 0 * x, "i", compile=GRAPH)(torch.zeros(4))
    drawn = torch.cat([got["draw_four"] for got in results(num_ranks)])
    torch.testing.assert_close(drawn, expected.cpu(), rtol=0, atol=0)


def test_the_comparison_can_fail():
    for got, expected in [
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.tensor([1.0]), torch.tensor(1.0)),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        (torch.tensor(1.0), Raised("ValueError", "")),
        (Raised("TypeError", "x"), Raised("ValueError", "x")),
        (Raised("ValueError", "x"), Raised("ValueError", "y")),
        (Raised("ValueError", "x"), torch.tensor(1.0)),
    ]:
        with pytest.raises(AssertionError):
            check(got, expected, "rank 0")
