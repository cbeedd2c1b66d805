"""Covers: _through_host.py, the collectives of ``SharedCuda``, with two ranks that are threads of
this process.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _support import in_threads
from _through_host import ThroughHost

from torchpmap._base.errors import GroupLost
from torchpmap._base.torch_groups import (
    add_backend,
    make_gloo,
    register_group,
    unregister_group,
)
from torchpmap._collectives.backend import c10d

HALF_A_MINUTE = timedelta(seconds=30)
X = [torch.arange(4.0), torch.arange(4.0) + 10]


@pytest.fixture(params=[HALF_A_MINUTE])
def names(request):
    """The name of the group of both, as each of them knows it."""
    store = dist.HashStore()

    def make(rank):
        group = dist.ProcessGroup(store, rank, 2)
        gloo = make_gloo(store, rank, 2, None, HALF_A_MINUTE, request.param)
        add_backend(group, "cpu", "GLOO", gloo, is_default=True)
        through = ThroughHost(group)
        register_group(f"of rank {rank}", through)
        return through

    groups = in_threads(2, make)
    yield [f"of rank {rank}" for rank in range(len(groups))]
    for rank in range(2):
        unregister_group(f"of rank {rank}")


COLLECTIVES = {
    "all_reduce": (lambda x, name: c10d.all_reduce(x, "max", name), [X[1], X[1]]),
    "all_gather": (lambda x, name: c10d.all_gather_into_tensor(x, 2, name), [torch.cat(X)] * 2),
    "reduce_scatter": (
        lambda x, name: c10d.reduce_scatter_tensor(x, "sum", 2, name),
        [torch.tensor([10.0, 12.0]), torch.tensor([14.0, 16.0])],
    ),
    "all_to_all": (
        lambda x, name: c10d.all_to_all_single(x, [2, 2], [2, 2], name),
        [torch.tensor([0.0, 1.0, 10.0, 11.0]), torch.tensor([2.0, 3.0, 12.0, 13.0])],
    ),
    "broadcast": (lambda x, name: c10d.broadcast(x, 1, name), [X[1], X[1]]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective(names, name):
    """... that does not write to what it is given."""
    function, expected = COLLECTIVES[name]
    given = [x.clone() for x in X]
    found = in_threads(2, lambda rank: c10d.wait_tensor(function(given[rank], names[rank])))
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert [x.tolist() for x in given] == [x.tolist() for x in X]
    assert [x._version for x in given] == [0, 0]


@pytest.mark.parametrize("names", [timedelta(seconds=0.2)], indirect=True)
def test_a_rank_that_waits_in_vain_loses_the_group(names):
    with pytest.raises(GroupLost):
        c10d.all_reduce(X[0], "sum", names[0])
