"""Facts, steps and findings as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchpmap._base.errors import size_text
from torchpmap._doctor.facts import Facts
from torchpmap._doctor.findings import Finding
from torchpmap._doctor.selftest import Step


def described(facts: Facts) -> Iterator[str]:
    """A line per section."""
    for name, line in _lines(facts):
        yield f"{name:<10}{line}"


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    versions, machine, devices = facts["versions"], facts["machine"], facts["devices"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "system", f"{machine['system']}, {machine['processor']}"
    memory = [machine[name] for name in ("available_bytes", "memory_bytes")]
    free = " of ".join("?" if each is None else size_text(each) for each in memory)
    cores = f"{machine['usable_cores']} of {machine['cores']} cores"
    yield "machine", f"{cores}, {free} of memory free"
    launcher = devices["launcher"]
    who = f", one per process of {launcher}" if launcher else ""
    there = ", ".join(f"{count} {kind}" for kind, count in devices["available"].items() if count)
    yield "devices", f"{devices['count']} {devices['kind']}{who} (this host has {there})"
    compiler, cache = facts["compiler"], facts["cache"]
    yield "compiler", f"{compiler['version']} ({compiler['command']})"
    yield "cache", f"{cache['folder']}, {size_text(cache['free_bytes'] or 0)} of disk free"
    sharing, network = facts["sharing"], facts["network"]
    how = "shared memory" if sharing["is_possible"] else "Gloo"
    yield "exchange", f"{how if devices['kind'] == 'cpu' else devices['collectives']} on one host"
    yield "files", f"{sharing['open_files']} may be open (at most {sharing['open_files_at_most']})"
    backends = [name for name in ("gloo", "nccl") if network[name]]
    interfaces = " ".join(network["interfaces"])
    where = f"{network['host']}, {network['address']}, interfaces {interfaces}"
    yield "network", f"{where}, {' and '.join(backends) or 'no back end'}"
    for name, value in facts["environment"].items():
        yield "variable", f"{name}={value}"


def described_step(step: Step) -> str:
    """One line, or more if it failed."""
    line = f"  {step.name:<32}{step.seconds:7.2f} s  "
    return line + ("ok" if step.error is None else f"FAILED\n    {step.error}")


def described_findings(found: list[Finding], steps: list[Step]) -> Iterator[str]:
    for each in found:
        yield f"{each.level}: {each.what}"
        yield f"  do: {each.do}"
    failed = sum(step.error is not None for step in steps)
    if failed:
        yield f"{failed} of {len(steps)} steps of the self-test failed"
    elif not found:
        yield "no findings"


def as_json(facts: Facts, found: list[Finding], steps: list[Step]) -> dict[str, Any]:
    return {
        "facts": facts,
        "findings": [vars(each) for each in found],
        "selftest": [vars(each) for each in steps],
    }
