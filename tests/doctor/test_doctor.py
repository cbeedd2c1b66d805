"""Covers: python -m torchpmap: facts, findings, the self-test, both commands."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

from torchpmap._doctor.facts import collect, of_torch
from torchpmap._doctor.findings import findings
from torchpmap._doctor.report import described, described_findings, described_step
from torchpmap._doctor.selftest import Step

FACTS = {
    "versions": {"torchpmap": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
    "machine": {
        "system": "Linux 6.1 x86_64",
        "is_linux": True,
        "processor": "a processor",
        "cores": 8,
        "usable_cores": 4,
        "memory_bytes": 32 << 30,
        "available_bytes": 16 << 30,
    },
    "settings": {"values": {}, "error": None},
    "devices": {
        "kind": "cpu",
        "count": 4,
        "launcher": None,
        "available": {"cpu": 4, "cuda": 0, "xpu": 0},
        "collectives": "GLOO",
        "is_built": {"cpu": True, "cuda": False, "xpu": False},
        "has_nvidia_driver": False,
    },
    "compiler": {"missing": None, "command": "/usr/bin/g++", "version": "g++ 12"},
    "cache": {
        "folder": "/tmp/compiled",
        "exists": True,
        "is_ours": True,
        "is_writable": True,
        "free_bytes": 50 << 30,
    },
    "sharing": {
        "is_possible": True,
        "memfd_error": None,
        "open_files": 1024,
        "open_files_at_most": 4096,
    },
    "network": {
        "host": "here",
        "address": "10.0.0.1",
        "is_resolved": True,
        "interfaces": ["lo", "eth0"],
        "gloo": True,
        "nccl": False,
    },
    "environment": {},
}


def changed(**changes):
    """The facts, with some of them changed: ``section_name=value``."""
    facts = copy.deepcopy(FACTS)
    for key, value in changes.items():
        section, _, name = key.partition("_")
        facts[section][name] = value
    return facts


def test_a_sound_machine_has_no_findings():
    assert findings(FACTS) == []


CASES = {
    "system": ({"machine_is_linux": False}, "problem", "needs Linux"),
    "old torch": ({"versions_torch": "2.9.1"}, "problem", "older than 2.11"),
    "new torch": ({"versions_torch": "2.31.0a0+git"}, "note", "newer than all"),
    "variable": ({"settings_error": "TORCHPMAP_WARM must be 0 or 1"}, "problem", "must be 0 or 1"),
    "test": (
        {"environment_TORCHPMAP_TEST_PLATFORM": "1"},
        "note",
        "TORCHPMAP_TEST_PLATFORM is set",
    ),
    "driver": ({"devices_has_nvidia_driver": True}, "note", "built without CUDA"),
    "cores": ({"devices_count": 8}, "note", "8 CPU devices share 4 cores"),
    "memory": ({"machine_available_bytes": 1 << 30}, "problem", "1.07 GB of memory are free"),
    "compiler": ({"compiler_missing": "C++ compiler was found"}, "problem", "right but slower"),
    "owner": ({"cache_is_ours": False}, "problem", "belongs to another user"),
    "cache": ({"cache_is_writable": False}, "problem", "cannot be written to"),
    "disk": ({"cache_free_bytes": 5 << 20}, "note", "5.24 MB of disk are left"),
    "memfd": ({"sharing_memfd_error": "no such call"}, "problem", "cannot be shared"),
    "gloo": ({"sharing_is_possible": False}, "note", "over Gloo"),
    "files": ({"sharing_open_files": 150}, "problem", "may open 150 files"),
    "name": ({"network_is_resolved": False}, "note", "has no address"),
    "nccl": ({"devices_collectives": "NCCL"}, "problem", "no NCCL"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_finds_what_it_is_for(name):
    changes, level, words = CASES[name]
    (found,) = findings(changed(**changes))
    assert found.level == level
    assert words in found.what
    assert found.do


def test_problems_come_first():
    both = findings(changed(devices_count=8, network_is_resolved=False, sharing_open_files=20))
    assert [each.level for each in both] == ["problem", "note", "note"]


def test_a_process_of_a_launcher_starts_no_workers():
    one_of_many = changed(devices_launcher="torchrun", devices_count=64, sharing_open_files=256)
    assert findings(one_of_many) == []
    assert "64 cpu, one per process of torchrun" in "\n".join(described(one_of_many))


def test_the_text():
    (finding,) = findings(changed(sharing_open_files=150))
    problem = "problem: This process may open 150 files; 4 workers need about 180."
    good, bad = Step("gradient", 0.5, None), Step("checkpoint", 0.5, "E: why")
    assert list(described_findings([finding], [good])) == [problem, "  do: ulimit -n 4096"]
    assert list(described_findings([], [good])) == ["no findings"]
    failed = "1 of 2 steps of the self-test failed"
    assert list(described_findings([], [good, bad])) == [failed]
    assert list(described_findings([finding], [good, bad]))[2:] == [failed]
    assert described_step(Step("gradient", 0.5, None)).split() == ["gradient", "0.50", "s", "ok"]
    assert described_step(Step("gradient", 0.5, "E: why")).endswith("FAILED\n    E: why")
    assert [line.split()[0] for line in described(FACTS)] == [
        *("versions", "system", "machine", "devices", "compiler", "cache", "exchange", "files"),
        "network",
    ]


def test_the_facts_of_this_machine():
    facts = collect()
    assert json.loads(json.dumps(facts)) == facts
    assert {name: type(facts[name]) for name in FACTS} == dict.fromkeys(FACTS, dict)
    for section, known in FACTS.items():
        assert known.keys() <= facts[section].keys() | facts["environment"].keys()
    assert f"PyTorch version: {torch.__version__}" in of_torch()
    list(described(facts))


def test_secrets_stay_here(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = collect()["environment"]
    assert environment["NCCL_DEBUG"] == "INFO"
    assert "AWS_SECRET_ACCESS_KEY" not in environment


TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "-m", "torchpmap")


def command(*args, module=("torchpmap",), **environment):
    return subprocess.run(
        [sys.executable, "-m", *module, *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )


@pytest.mark.long
def test_the_doctor_runs_the_self_test():
    done = command("doctor", "--json", "--num-devices", "2")
    report = json.loads(done.stdout)
    steps = {each["name"]: each["error"] for each in report["selftest"]}
    assert steps == dict.fromkeys(
        [
            *("devices start", "collective", "compiled function", "gradient", "large values"),
            *("checkpoint", "a worker that dies is replaced"),
        ]
    )
    assert all(each["seconds"] > 0 for each in report["selftest"])
    assert report["facts"]["devices"]["count"] == 2
    assert done.returncode == int(any(each["level"] == "problem" for each in report["findings"]))


@pytest.mark.long
def test_the_self_test_without_workers():
    """It ends a worker where there is one, and not its own process."""
    done = command("doctor", "--json", TORCHPMAP_RUNTIME="inline")
    assert {each["error"] for each in json.loads(done.stdout)["selftest"]} == {None}
    assert "a worker that dies is replaced" not in done.stdout


@pytest.mark.long
def test_the_processes_of_a_job_are_tested_together():
    report = json.loads(command("doctor", "--json", module=TORCHRUN).stdout)  # of one of them
    assert report["facts"]["devices"]["launcher"] == "torchrun"
    errors = {each["name"]: each["error"] for each in report["selftest"]}
    assert errors == dict.fromkeys(
        ["devices start", "collective", "compiled function", "gradient", "large values"]
    )


@pytest.mark.long
def test_the_doctor_tells_what_does_not_work():
    done = command("doctor", TORCHPMAP_NUM_DEVICES="none")
    assert done.returncode == 1
    text = "TORCHPMAP_NUM_DEVICES must be an int from 1 to 256, but got 'none'."
    assert f"problem: {text}\n  do: Correct or unset the variable.\n" in done.stdout
    assert f"FAILED\n    ValueError: {text}\n" in done.stdout


ROWS = [
    "call and wait",
    *(f"psum of {size}, and wait" for size in ("4 B", "1 MB", "64 MB")),
    *("ppermute of 1 MB, and wait", "fetch 64 MB", "call with 64 MB of host memory"),
    *("one more leaf of 100", "chained call"),
]


@pytest.mark.long
def test_the_table_of_this_machine():
    done = command("bench", "--json", "--num-devices", "2")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows[1:]] == ROWS
    assert all(row["value"] > 0 for row in rows)


def test_an_argument_that_is_no_setting():
    done = command("doctor", "--num-devices", "0")
    assert done.returncode == 2
    text = "error: num_devices must be an int from 1 to 256, but got 0."
    assert done.stderr.splitlines()[-1].endswith(text)
    assert "Traceback" not in done.stderr


def test_a_command_is_needed():
    done = command()
    assert done.returncode == 2
    assert "{doctor,bench,replay,convert}" in done.stderr
