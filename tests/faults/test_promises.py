"""Rows 28 to 30 of the matrix: bad input, strangers, and the same numbers again.

See docs/faults.md.
"""

import os
import pickle
import socket
import threading

import pytest
import torch
from _launched import script
from _leftovers import listening
from _rig import EAGER, Canary, N, eagerly, rows, total, within
from _spies import asked
from _support import pool_with, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

identity = tp.pmap(lambda x: x, "i", compile=EAGER)


def locked():
    lock = threading.Lock()
    return lambda x: x * 2 if lock else x


BAD = {
    "a function that cannot be pickled": (lambda: eagerly(locked())(rows), TypeError),
    "one that is to be differentiated": (
        lambda: eagerly(locked())(rows.clone().requires_grad_()), TypeError),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_row_28_bad_input_sends_nothing(name, monkeypatch):
    """More of it: tests/transforms/test_messages.py."""
    call, kind = BAD[name]
    used = asked(monkeypatch)
    error = within(10, call).error
    assert isinstance(error, kind), error
    assert not used, "something was sent"


@pytest.mark.parametrize("shared_memory", [True, False])
def test_row_29_strangers(shared_memory, tmp_path):
    """Nothing listens off the loopback address, and noise to what does listen changes nothing."""
    with pool_with(N, shared_memory=shared_memory):
        assert total(rows).tolist() == [6.0] * N
        found = listening([os.getpid(), *worker_pids()])
        assert all(address.startswith("0100007F:") for address in found), found
        for port in [int(address.partition(":")[2], 16) for address in found]:
            hostile = pickle.dumps(Canary(str(tmp_path / "ran")))
            for noise in (bytes(1024), hostile, bytes(range(256)) * 4):
                with socket.socket() as stranger:
                    stranger.settimeout(1)
                    stranger.connect(("127.0.0.1", port))
                    stranger.sendall(noise)
        assert within(2, lambda: total(rows).tolist()).value == [6.0] * N
        assert eagerly(lambda x: tp.psum(x, "i"))(rows).tolist() == [6.0] * N
        assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_row_29_files_of_a_program_are_private():
    program = script(
        """
        import stat, tempfile
        os.umask(0)
        tp.init(num_devices=2)
        tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)(torch.arange(2.)).tolist()
        for folder, folders, files in os.walk(tempfile.gettempdir()):
            for name in [*folders, *files]:
                mode = os.stat(os.path.join(folder, name)).st_mode
                if folder == tempfile.gettempdir() or not stat.S_ISSOCK(mode):
                    print(oct(mode & 0o077), name)
        """
    )
    output = program.wait(40).clean()
    assert all(line.startswith("0o0 ") for line in output.splitlines()), output


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.long("2")
def test_row_30_bitwise_equal_runs(devices):
    """Run to run, rank to rank, compiled or not, and after a repair."""
    draws = tp.pmap(_draw, "i", compile=EAGER)
    tp.init(devices)
    answers = set()
    for attempt in range(3):
        torch.manual_seed(7)
        total, gathered = draws(torch.ones(4, 64))
        assert all(torch.equal(total[0], row) for row in total)
        assert all(torch.equal(gathered[0], row) for row in gathered)
        assert not torch.equal(gathered[0][0], gathered[0][1]), "streams differ between rows"
        answers.add(gathered.cpu().numpy().tobytes() + total.cpu().numpy().tobytes())
        if attempt == 1:
            os.kill(worker_pids(devices)[-1], 9)
            within(2, lambda: identity(torch.zeros(devices)).cpu())
    assert len(answers) == 1


def _draw(x):
    x = torch.randn(64) + torch.nn.functional.dropout(x, 0.5)
    return tp.psum(x, "i"), tp.all_gather(x, "i")
