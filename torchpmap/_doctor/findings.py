"""From facts to findings: what is wrong or unusual, and what to do about it (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torchpmap._base.errors import size_text
from torchpmap._doctor.facts import Facts

Level = Literal["problem", "note"]

_OLDEST, _NEWEST = (2, 11), (2, 15)
"""Versions of torch with which the tests were run (docs/versions.md)."""
_WORKER_BYTES = 300 << 20
"""What a worker takes before it holds values."""
_FILES_PER_WORKER, _OTHER_FILES = 20, 100
_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """``problem``: something does not work; ``note``: it works, but differently or slowly."""

    level: Level
    what: str
    do: str


def findings(facts: Facts) -> list[Finding]:
    """Problems first."""
    found = [each for rule in _RULES for each in rule(facts)]
    return sorted(found, key=lambda each: each.level != "problem")


def _system(facts: Facts) -> Iterator[Finding]:
    if not facts["machine"]["is_linux"]:
        what = f"torchpmap needs Linux, and this is {facts['machine']['system']}."
        yield Finding("problem", what, "Use Linux; on Windows WSL 2 will do.")


def _torch(facts: Facts) -> Iterator[Finding]:
    text = facts["versions"]["torch"]
    version = tuple(int(part) for part in text.split(".")[:2])
    if version < _OLDEST:
        what = f"torch {text} is older than {'.'.join(map(str, _OLDEST))}, the oldest that works."
        yield Finding("problem", what, "pip install --upgrade torch")
    elif version > _NEWEST:
        what = f"torch {text} is newer than all that torchpmap was tested with."
        newest = ".".join(map(str, _NEWEST))
        yield Finding("note", what, f"If something fails, compare with torch {newest}.")


def _settings(facts: Facts) -> Iterator[Finding]:
    if facts["settings"]["error"] is not None:
        yield Finding("problem", facts["settings"]["error"], "Correct or unset the variable.")
    for name in facts["environment"]:
        if name.startswith("TORCHPMAP_TEST_"):
            what = f"{name} is set, which changes the devices for torchpmap's own tests."
            yield Finding("note", what, f"unset {name}")


def _devices(facts: Facts) -> Iterator[Finding]:
    devices, machine = facts["devices"], facts["machine"]
    kind, count = devices["kind"], devices["count"]
    accelerators = [name for name in devices["available"] if name != "cpu"]
    if devices["has_nvidia_driver"] and not any(devices["is_built"][x] for x in accelerators):
        what = "There is an NVIDIA driver, but this torch was built without CUDA: it uses the CPU."
        yield Finding("note", what, "Install a build of torch with CUDA (pytorch.org says how).")
    if kind == "cpu" and devices["launcher"] is None and count > machine["usable_cores"]:
        what = (
            f"{count} CPU devices share {machine['usable_cores']} cores: results are right, but "
            "devices wait for each other."
        )
        yield Finding("note", what, "Use as many devices as cores, unless this is a test.")
    needed, free = count * _WORKER_BYTES, machine["available_bytes"]
    if devices["launcher"] is None and free is not None and free < needed:
        what = f"{size_text(free)} of memory are free; {count} workers take {size_text(needed)}."
        yield Finding("problem", what, "Use fewer devices (TORCHPMAP_NUM_DEVICES), or free memory.")


def _compiler(facts: Facts) -> Iterator[Finding]:
    missing = facts["compiler"]["missing"]
    if missing is not None:
        what = f"No {missing}: mapped functions run as traced graphs, right but slower."
        yield Finding("problem", what, "Install one (Debian, Ubuntu: apt install g++).")


def _cache(facts: Facts) -> Iterator[Finding]:
    cache = facts["cache"]
    folder = cache["folder"]
    choose = "Set TORCHINDUCTOR_CACHE_DIR to a folder of yours."
    if not cache["is_ours"]:
        what = f"{folder}, where compiled code is kept, belongs to another user."
        yield Finding("problem", what, choose)
    elif not cache["is_writable"]:
        yield Finding("problem", f"{folder}, for compiled code, cannot be written to.", choose)
    elif cache["free_bytes"] is not None and cache["free_bytes"] < _CACHE_BYTES:
        free = size_text(cache["free_bytes"])
        what = f"{free} of disk are left at {folder}, where compiled code is kept."
        yield Finding("note", what, f"Free some, or: {choose[0].lower()}{choose[1:]}")


def _sharing(facts: Facts) -> Iterator[Finding]:
    sharing = facts["sharing"]
    if sharing["memfd_error"] is not None:
        what = f"Memory cannot be shared between processes: {sharing['memfd_error']}."
        yield Finding("problem", what, "The kernel needs memfd_create (Linux 3.17).")
    elif not sharing["is_possible"] and facts["devices"]["kind"] == "cpu":
        what = "CPU devices exchange data over Gloo, slower than in shared memory."
        yield Finding("note", what, "Shared memory needs Linux on x86-64.")
    needed = _OTHER_FILES + _FILES_PER_WORKER * facts["devices"]["count"]
    if facts["devices"]["launcher"] is None and sharing["open_files"] < needed:
        what = (
            f"This process may open {sharing['open_files']} files; {facts['devices']['count']} "
            f"workers need about {needed}."
        )
        yield Finding("problem", what, f"ulimit -n {max(4096, needed)}")


def _network(facts: Facts) -> Iterator[Finding]:
    network = facts["network"]
    if not network["is_resolved"]:
        what = f"The name of this host, {network['host']}, has no address."
        do = "Several hosts cannot meet then: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME."
        yield Finding("note", what, do)
    if facts["devices"]["collectives"] == "NCCL" and not network["nccl"]:
        yield Finding("problem", "This torch has no NCCL.", "Install a build of torch with CUDA.")


_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(_system, _torch, _settings, _devices, _compiler, _cache, _sharing, _network),
)
