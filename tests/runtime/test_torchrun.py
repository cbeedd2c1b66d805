"""Covers: the runtime of processes that a launcher started, with 2 and 4 ranks on this host.

The cases and what they must give are in ``_torchrun_cases.py`` and ``_torchrun_values.py``; each
number of ranks is one job that runs them all, and every case is a test that looks at what its ranks
got.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from _launched import Raised, answers, check, launch
from _support import mostly_long, names_to_run
from _torchrun_values import CASES, GRAPH, Case

import torchpmap as tp

PROGRAM = str(Path(__file__).with_name("_torchrun_values.py"))

RANKS = mostly_long([2, 4], 2)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Number of ranks -> what each rank got, by case."""
    known: dict[int, list[dict[str, Any]]] = {}
    names = names_to_run(request, "test_case")

    def of(num_ranks: int) -> list[dict[str, Any]]:
        if num_ranks not in known:
            folder: Path = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            finished = launch(num_ranks, PROGRAM, str(folder), *names)
            assert finished.code == 0, finished.output
            known[num_ranks] = answers(num_ranks, folder)
        return known[num_ranks]

    return of


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", mostly_long(CASES, *CASES.keys() - {"through_inductor"}))
def test_case(results, name, num_ranks):
    case: Case = CASES[name]
    for rank, got in enumerate(results(num_ranks)):
        check(got[name], case.expected(rank, num_ranks), f"rank {rank}")


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
