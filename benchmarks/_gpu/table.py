"""The lines of a journal as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}


def rendered(
    machine: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], waiting: Sequence[str]
) -> str:
    """All results, section by section; what went wrong comes first."""
    text = ["# torchpmap on a GPU", ""]
    text += [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    if not machine.get("gpu"):
        text += ["**No GPU: these numbers test the script, and measure nothing.**", ""]
    text += _wrong(lines)
    text += [f"* {name}: not run" for name in waiting]
    for section in dict.fromkeys(line["section"] for line in lines):
        mine = [line for line in lines if line["section"] == section]
        text += ["", f"## {section}", "", *_numbers(mine), *_checks(mine)]
    return "\n".join(text) + "\n"


def compared(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the three sections of training say together."""
    found = {
        (line["section"], line["name"]): line["value"]
        for line in lines
        if line["section"].startswith("training") and line.get("value") is not None
    }
    steps = {section: value for (section, name), value in found.items() if name == "step"}
    losses = {k: value for (k, name), value in found.items() if name == "loss of the last step"}
    plain = steps.pop("training-compile", None)
    made: list[dict[str, Any]] = [
        {"name": f"{name}: step", "unit": "x torch.compile", "value": step / plain}
        for name, step in steps.items()
        if plain
    ]
    if len(losses) > 1:
        same = max(losses.values()) - min(losses.values()) < 0.02 * max(losses.values())
        made.append({"name": "equal losses", "passed": same, "detail": str(losses)})
    return [{"section": "training, compared", **line} for line in made]


def _wrong(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    text = []
    for line in lines:
        if line.get("passed") is False:
            text += [f"* {line['section']}, **{line['name']}** is not as it must be:", ""]
            text += ["```text", line["detail"], "```"]
        if line.get("ended", 0) != 0:
            how = "took too long" if line["ended"] is None else f"ended with code {line['ended']}"
            text += [f"* **{line['section']} {how}** after {line['seconds']} s:", ""]
            text += ["```text", line["log"].strip(), "```"]
    return text


def _numbers(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for line in lines:
        if "median_s" in line:
            scale, medians = UNITS[line["unit"]], line["median_s"]
            first = next(iter(medians.values()))
            cells = [f"{name} {seconds * scale:.1f}" for name, seconds in medians.items()]
            cells[1:] = [
                f"{cell} ({first / seconds:.2f} x)"
                for cell, seconds in zip(cells[1:], list(medians.values())[1:], strict=True)
            ]
            rows.append(f"| {line['name']} | {line['unit']} | {', '.join(cells)} |")
        elif "value" in line:
            value = "-" if line["value"] is None else f"{line['value']:.4g}"
            rows.append(f"| {line['name']} | {line['unit']} | {value} |")
        elif "note" in line:
            rows.append(f"| {line['name']} | | {line['note']} |")
    return ["| what | unit | |", "|---|---|---|", *rows, ""] if rows else []


def _checks(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    checks = [line for line in lines if "passed" in line]
    good = sum(line["passed"] for line in checks)
    return [f"{good} of {len(checks)} checks passed.", ""] if checks else []
