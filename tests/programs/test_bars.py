"""Covers: benchmarks/bars.py, but for what it measures."""

import json
from pathlib import Path
from typing import Any

import pytest
from _support import imported

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bars() -> Any:
    return imported(ROOT / "benchmarks" / "bars.py")


def test_a_time_beside_jax_is_the_ratio_of_medians(bars):
    bar = bars.Bar("call", ("sync", "total", 2), 0.5, "jax.pmap")
    ours, theirs = [1.0, 2.0, 9.0], [4.0, 4.0, 10.0]
    row = bars.judge(bar, {"torchpmap": ours, "jax.pmap": theirs})
    assert (row.value, row.spread, row.verdict) == (0.5, (0.25, 0.9), "PASS")
    slower = bars.judge(bar, {"torchpmap": ours, "jax.pmap": [3.9, 3.9, 10.0]})
    assert slower.verdict == "FAIL"


def test_a_number_in_a_unit_of_its_own(bars):
    bar = bars.Bar("idle", ("idle", "memory", None), 600.0, unit="MB")
    row = bars.judge(bar, {"torchpmap": [500e6, 700e6, 900e6]})
    assert (row.value, row.spread, row.verdict) == (700.0, (500.0, 900.0), "FAIL")


def test_what_was_not_measured_neither_passes_nor_fails(bars):
    bar = bars.Bar("call", ("sync", "total", 2), 0.5, "jax.pmap")
    assert bars.judge(bar, {"torchpmap": [1.0]}).verdict == "no jax"
    assert bars.judge(bar, None).verdict == "not measured"


def test_the_page_is_made_from_the_json(bars):
    bar = bars.Bar("call", ("sync", "total", 2), 0.5, "jax.pmap")
    rows = [bars.judge(bar, {"torchpmap": [1.0], "jax.pmap": [4.0]}), bars.judge(bar, None)]
    facts = {"date": "2026-11-27T10:00:00", "cpu": "Xeon", "num_cores": 2, "load_average": 0.1}
    facts |= {"torch": "2.13.0", "jax": None, "python": "3.11.2"}
    report = {"environment": facts, "quick": False, "rows": [vars(row) for row in rows]}
    text = bars.page(json.loads(json.dumps(report)))
    assert text.startswith(bars.INTRODUCTION)
    assert text.endswith(
        "|  | measured | bar |  | least and most of the rounds |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| call | 0.25 x | 0.5 x | PASS | 0.25 to 0.25 |\n"
        "| call |  | 0.5 x | not measured |  |\n"
    )
    assert "1 of 2 bars are met. 2026-11-27: Xeon, 2 cores,\nload 0.10 before it" in text


def test_the_page_in_docs_is_one_that_was_made(bars):
    assert (ROOT / "docs" / "benchmarks.md").read_text().startswith(bars.INTRODUCTION)
    assert len({bar.key for bar in bars.BARS}) == len(bars.BARS)
