"""Covers: processes on two hosts, which here are two network namespaces joined by a cable.

Each has 2 ranks, started by a torchrun of its own; nothing says which interface Gloo is to use.
Needs root and ``ip``; skipped where namespaces are not allowed.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from _launched import Job, answers, check, free_port, succeed
from _support import names_to_run, wait_for
from _torchrun_values import CASES

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.cpu_only("hosts here are namespaces"),
]

HOSTS = ("10.213.77.1", "10.213.77.2")
RANKS_PER_HOST = 2
NAMES = [
    *("psum-traced", "psum-untraced", "all_gather-traced", "ppermute-traced"),
    *("psum_in_groups-traced", "out_axes_none_of_varying_values_is_the_first_rows-traced"),
    *("devices_of_this_process-traced", "devices_reversed-traced", "devices_of_some_processes"),
    *("counts", "backward", "a_spanning_argument_makes_the_call_global"),
    *("data_parallel_training-traced", "through_inductor", "multihost_broadcast"),
    *("multihost_all_gather", "multihost_assert_equal"),
]


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts():
    """For each host, what to put before a command to run it there."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"tp{os.getpid()}{letter}" for letter in "ab"]
    cables = [f"v{name}" for name in names]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for name, cable, address in zip(names, cables, HOSTS, strict=True):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                _ip("-n", name, "link", "set", cable, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _static(host: int, port: int) -> tuple[str, ...]:
    return f"--node-rank={host}", f"--master-addr={HOSTS[0]}", f"--master-port={port}"


def _start(hosts, num_ranks, *command):
    port = free_port()
    return [
        Job(
            num_ranks,
            *command,
            options=("--nnodes=2", *_static(host, port)),
            prefix=prefix,
            # which they could share here, but hosts cannot
            environment={"TORCHPMAP_SHARED_MEMORY": "0"},
        )
        for host, prefix in enumerate(hosts)
    ]


@pytest.fixture(scope="module")
def results(request, hosts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_hosts")
    program = str(Path(__file__).with_name("_torchrun_values.py"))
    names = names_to_run(request, "test_case_on_two_hosts")
    succeed(*_start(hosts, RANKS_PER_HOST, program, str(folder), *names))
    return answers(2 * RANKS_PER_HOST, folder)


CUT_OFF = """
import pathlib, sys
import torch, torchpmap as tp
tp.config.timeout = 5
add = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile={"backend": "eager"})
add(torch.ones(1))
pathlib.Path(sys.argv[1], f"ready{tp.process_index()}").touch()
while True:
    add(torch.ones(1))
"""


def test_a_cut_cable_ends_both_hosts(hosts, tmp_path):
    """Also the one that does not have the store, which answers it no more."""
    script = tmp_path / "cut_off.py"
    script.write_text(CUT_OFF)
    jobs = _start(hosts, 1, str(script), str(tmp_path))
    host = hosts[1][-1]
    try:
        ready = [tmp_path / f"ready{host}" for host in range(2)]
        assert wait_for(lambda: all(file.exists() for file in ready), 100)
        _ip("-n", host, "link", "set", f"v{host}", "down")
        for job in jobs:
            ended = job.wait()
            assert ended.code == 1, ended.output
            assert "WorkerDied: the connection to another process of this job broke" in ended.output
    finally:
        for job in jobs:
            job.kill()
        _ip("-n", host, "link", "set", f"v{host}", "up")


@pytest.mark.parametrize("name", NAMES)
def test_case_on_two_hosts(results, name):
    for rank, got in enumerate(results):
        check(got[name], CASES[name].expected(rank, len(results)), f"rank {rank}")
