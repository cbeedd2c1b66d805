"""Covers: _runtime/torchrun/place.py."""

from types import SimpleNamespace

import pytest

from torchpmap._base.errors import PmapError
from torchpmap._runtime.torchrun.place import Placement, choose, refuse_shared, share_code
from torchpmap._runtime.torchrun.runtime import TorchrunRuntime
from torchpmap._trace.compile import EAGER, INDUCTOR


def on(hardware, number=0, host="node0"):
    return Placement(host, hardware, number)


@pytest.mark.parametrize(
    ("visible", "local_rank", "chosen", "number"),
    [
        (8, 0, None, 0),
        (8, 3, None, 3),
        (1, 3, None, 0),  # the launcher shows each process its own
        (8, 3, 3, 3),  # torch.cuda.set_device(local_rank) before
        (8, 3, 5, 5),
        (8, 3, 0, 3),  # the default of a process that has used CUDA
    ],
)
def test_choice(visible, local_rank, chosen, number):
    assert choose(visible, local_rank, chosen) == number


def test_no_device_is_left():
    text = "local rank 2 has no device of its own: 2 are visible, and each process needs one."
    with pytest.raises(ValueError, match=text):
        choose(2, 2, None)


def test_two_processes_on_one_device():
    refuse_shared([on("a"), on("b"), on("c", host="node1")])
    refuse_shared([on(""), on("")])  # of which nothing is known
    text = (
        r"^rank 1 \(device 1 of those that it sees, host node0\) and rank 2 \(device 0, host "
        r"node1\) have the same device: b\. .* Start at most as many processes per host"
    )
    with pytest.raises(ValueError, match=text):
        refuse_shared([on("a"), on("b", 1), on("b", host="node1"), on("a")])


def test_code_is_shared_where_the_number_is_the_same():
    assert share_code([on("a"), on("b"), on("c", host="node1")])
    assert not share_code([on("a", 0), on("b", 1)])


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("backend", [INDUCTOR, EAGER])
def test_processes_take_turns_only_for_what_they_share(shares, ranks, backend):
    runtime = TorchrunRuntime.__new__(TorchrunRuntime)  # it would meet the others
    runtime._shares_code = shares
    runtime._rendezvous = SimpleNamespace(in_turn=lambda ranks, name: "a turn")
    definition = SimpleNamespace(backend=backend, ranks=ranks, name="f")
    takes_turns = runtime._in_turn(definition) == "a turn"
    assert takes_turns is (shares and len(ranks) == 2 and backend is INDUCTOR)


def test_what_a_stranger_posts():
    assert Placement.of(("host", "a", 1)) == Placement("host", "a", 1)
    for data in (("host", "a"), ["host", "a", 1], ("host", "a", "1"), None):
        with pytest.raises(PmapError, match="instead of a placement"):
            Placement.of(data)
