"""Covers: torchpmap.resize: values, functions and training go on with other devices."""

import contextlib
import gc
import operator
import os
import resource
import signal
import threading
from concurrent.futures import Future

import pytest
import torch
from _interrupts import NO_HANDLER, interrupted_at
from _support import (
    EAGER,
    beside,
    eagerly,
    in_threads,
    is_running,
    kill,
    num_fds,
    running_pool,
    wait_for,
    worker_pids,
)

import torchpmap as tp
from torchpmap._runtime import current
from torchpmap._runtime.local.pool import Pool

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(48.0).reshape(12, 4)
NUMBERS = torch.arange(24.0, dtype=torch.float64).reshape(12, 2)


def mesh(*sizes):
    return tp.make_mesh(sizes, ("a", "b")[: len(sizes)])


def put(value, sizes, *spec):
    return tp.device_put(value, tp.NamedSharding(mesh(*sizes), tp.P(*spec)))


def where(x):
    """The sizes of its mesh, and the part that each device has."""
    return x.sharding.mesh.devices.shape, [shard.data.shape for shard in x.addressable_shards]


MAKE = {
    "replicated": lambda: tp.replicate(X),
    "rows": lambda: tp.shard_batch(X),
    "columns": lambda: put(X, (4,), None, "a"),
    "grid": lambda: put(X, (2, 2), "a", "b"),
    "half a grid": lambda: put(X, (2, 2), "b"),
}
PARTS = {  # 4 devices -> n: sizes of the mesh, shape of a block
    ("replicated", 2): ((2,), (12, 4)),
    ("replicated", 6): ((6,), (12, 4)),
    ("rows", 1): ((1,), (12, 4)),
    ("rows", 3): ((3,), (4, 4)),
    ("rows", 6): ((6,), (2, 4)),
    ("rows", 5): ((5,), (12, 4)),  # nothing divides by 5
    ("columns", 2): ((2,), (12, 2)),
    ("columns", 3): ((3,), (4, 4)),  # 4 columns do not divide by 3
    ("grid", 2): ((1, 2), (12, 2)),
    ("grid", 6): ((3, 2), (4, 2)),
    ("grid", 3): ((3,), (4, 4)),  # axis b has size 2
    ("half a grid", 6): ((3, 2), (6, 4)),
}


@pytest.mark.parametrize(("kind", "n"), PARTS)
def test_a_value_lies_on_the_new_devices_as_on_the_old(kind, n):
    x = MAKE[kind]()
    tp.resize(n)
    assert tp.device_count() == n
    sizes, block = PARTS[kind, n]
    assert where(x) == (sizes, [block] * n)
    assert torch.equal(x.cpu(), X)
    assert torch.equal((x + 1).cpu(), X + 1)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.zeros(0, 3), torch.arange(1 << 18)])
def test_every_kind_of_value_keeps_its_numbers(value):
    x = tp.replicate(value)
    tp.resize(3)
    assert torch.equal(x.cpu(), value)
    assert x.cpu().dtype is value.dtype


def test_a_value_on_some_devices_stays_on_those_that_remain():
    on = [tp.device_put(X, device) for device in tp.devices()]
    tp.resize([tp.devices()[3], tp.devices()[1]])
    assert [[device.id for device in x.devices()] for x in on] == [[0], [1], [0], [0]]
    assert all(torch.equal(x.cpu(), X) for x in on)


def test_devices_and_workers_are_new_and_the_old_ones_end():
    before = worker_pids()
    tp.resize(2)
    assert len(tp.devices()) == 2
    now = worker_pids(2)
    assert not any(map(is_running, before))
    tp.resize(2)  # they are there already
    tp.resize(tp.devices())
    assert worker_pids(2) == now


def test_devices_that_have_not_started_are_only_chosen():
    tp.shutdown()
    tp.init(4)
    tp.shutdown()
    tp.resize(3)
    assert tp.device_count() == 3


def test_tensors_are_the_same_objects_with_their_gradients_and_links():
    x = tp.replicate(X).requires_grad_()
    (x * 2).sum().backward()
    view, alias = x.detach().view(-1), x.detach()
    tp.resize(2)
    assert x.is_leaf
    assert x.requires_grad
    assert torch.equal(x.grad.cpu(), torch.full_like(X, 2.0))
    alias.add_(1)
    view[0] = 9.0
    assert x[0, 0].item() == alias[0, 0].item() == 9.0
    assert torch.equal(x.detach().cpu().flatten()[1:], X.flatten()[1:] + 1)


def test_values_that_the_collector_does_not_see():
    x = tp.replicate(X)
    gc.freeze()
    try:
        tp.resize(2)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert torch.equal(x.cpu(), X)


def test_it_waits_for_a_call_that_runs():
    y = eagerly(lambda x: torch.linalg.matrix_power(x, 3))(
        tp.replicate(torch.eye(300)).expand(4, 300, 300)
    )
    tp.resize(2)
    assert torch.equal(y.cpu(), torch.eye(300).expand(4, 300, 300))


# --- functions ------------------------------------------------------------------------------------


def test_mapped_functions_go_on_with_what_they_close_over(mode):
    w, host = tp.replicate(torch.tensor(2.0)), torch.tensor(10.0)
    f = tp.pmap(lambda x: tp.psum(x * w + host, "i"), "i", compile=mode)
    assert f(torch.ones(4)).tolist() == [48.0] * 4
    tp.resize(2)
    assert f(torch.ones(2)).tolist() == [24.0] * 2
    w.add_(1)
    host += 1
    assert f(torch.ones(2)).tolist() == [28.0] * 2
    tp.resize(3)
    assert f(torch.ones(3)).tolist() == [42.0] * 3


def network():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return net.double()


def jitted(model):
    """A step of Adam, whose state and numbers are on the devices."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    @tp.jit(fullgraph=True)
    def step(x):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def replicated():
    return tp.replicate(network())


def fully_sharded():
    return tp.shard_module(network(), {"0.weight|0.bias": tp.P("a")}, mesh(tp.device_count()))


def losses(step, num_steps):
    return [step(tp.shard_batch(NUMBERS / 24)).item() for _ in range(num_steps)]


def test_training_that_loses_a_device_has_the_losses_of_fewer_devices():
    tp.init(3)
    wanted = losses(jitted(replicated()), 8)
    tp.init(4)
    step = jitted(replicated())
    found = losses(step, 4)
    kill(worker_pids()[0])  # a copy of everything is on the others
    tp.resize(tp.devices()[1:])
    found += losses(step, 4)
    assert tp.device_count() == 3
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)
    assert wanted[-1] < wanted[0]


def test_training_of_parameters_that_are_cut_goes_on_with_more_and_fewer_devices():
    tp.init(1)
    wanted = losses(jitted(replicated()), 9)
    tp.init(5)  # 5 rows of weights
    with tp.set_mesh(mesh(5)):
        model = fully_sharded()
    step = jitted(model)
    x = tp.replicate(NUMBERS / 24)
    found = [step(x).item() for _ in range(3)]
    for n in (1, 5):
        tp.resize(n)
        assert len(model[0].weight.addressable_shards[0].data) == 5 // n
        found += [step(x).item() for _ in range(3)]
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)


def test_a_mapped_step_that_loses_a_device_is_made_again_on_the_others():
    """The state before the call is whole, as the call has not been given it for good."""

    def loss(w, x):
        return (x @ w - x.sin().sum(1)).square().mean()

    def train(fails_at=None):
        def step(w, x, k):
            if k == fails_at and int(tp.axis_index("i")) == 2:
                os._exit(1)
            return w - 0.3 * tp.pmean(torch.func.grad(loss)(w, x), "i")

        mapped = eagerly(step, in_axes=(None, 0, None), out_axes=None)
        w = tp.replicate(torch.zeros(2, dtype=torch.float64))
        for k in range(6):
            n = tp.device_count()
            batch = (NUMBERS / 24).reshape(n, 12 // n, 2)
            try:
                new = mapped(w, batch, k).block_until_ready()
            except tp.WorkerDied as death:
                tp.resize([device for device in tp.devices() if device.id != death.rank])
                n = tp.device_count()
                new = mapped(w, (NUMBERS / 24).reshape(n, 12 // n, 2), -1)
            w = new
        return w.cpu()

    tp.init(3)
    wanted = train()
    tp.init(4)
    found = train(fails_at=3)
    assert tp.device_count() == 3
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


# --- what is lost ---------------------------------------------------------------------------------


def test_what_only_a_dead_worker_had_is_lost_and_stays_so():
    copies, cut, half = tp.replicate(X), tp.shard_batch(X), put(X, (2, 2), "a")
    cut.block_until_ready()
    kill(worker_pids()[0])
    for n in (3, 4):
        tp.resize(n)
        assert torch.equal(copies.cpu(), X)
        assert torch.equal(half.cpu(), X)  # devices 0 and 1 had the same rows
        for use in (cut.cpu, lambda: cut + 1, lambda: eagerly(lambda x: x)(cut)):
            with pytest.raises(tp.ShardLost, match=r"cpu:0 is lost: .* died: SIGKILL"):
                use()
    assert cut.shape == (12, 4)
    cut = tp.shard_batch(X)
    assert torch.equal((cut + copies).cpu(), X + X)


def lose_for_good(rank):
    """Kill each worker of a rank as soon as there is one, until the pool is given up."""
    pool = running_pool()

    def strike():
        killed = set()
        while pool.closed_because is None:
            worker = pool.workers[rank]
            if worker.pid is not None and worker not in killed:
                worker.kill()
                killed.add(worker)

    with beside(strike):
        while pool.closed_because is None:
            with contextlib.suppress(tp.WorkerDied, tp.RuntimeClosed):
                pool.repair()
    return pool


@pytest.mark.parametrize("dies", [False, True], ids=["", "another dies meanwhile"])
def test_a_device_that_gets_no_worker_any_more_costs_only_what_it_had_alone(dies):
    pids = worker_pids()
    copies, cut, half = tp.replicate(X), tp.shard_batch(X), put(X, (2, 2), "a")
    alone = [tp.device_put(X, device).block_until_ready() for device in tp.devices()]
    given_up = lose_for_good(2)
    with pytest.raises(tp.RuntimeClosed, match=r"died: .*\. torchpmap.resize with"):
        copies.cpu()
    if dies:
        given_up.workers[0].kill()
    tp.resize([device for device in tp.devices() if device.id != 2])
    assert not any(map(is_running, pids))
    assert tp.device_count() == 3
    for kept in (copies, half, alone[1], alone[3], *([] if dies else [alone[0]])):
        assert torch.equal(kept.cpu(), X)
    for lost in (cut, alone[2], *([alone[0]] if dies else [])):
        with pytest.raises(tp.ShardLost, match=r"cpu:[02] is lost: .* died"):
            lost.cpu()
    assert eagerly(lambda x: tp.psum(x, "i"), "i")(torch.ones(3)).tolist() == [3.0] * 3


def test_without_resize_a_pool_that_was_given_up_is_replaced():
    copies, pids = tp.replicate(X), worker_pids()
    lose_for_good(2)
    assert not set(worker_pids()) & set(pids)
    assert wait_for(lambda: not any(map(is_running, pids)))
    with pytest.raises(tp.RuntimeClosed, match="cannot be started or repaired"):
        copies.cpu()


def test_as_many_devices_again_keep_what_the_others_have():
    copies, alone = tp.replicate(X), tp.device_put(X, tp.devices()[2]).block_until_ready()
    lose_for_good(2)
    tp.resize(4)
    assert torch.equal(copies.cpu(), X)
    with pytest.raises(tp.ShardLost, match="died: SIGKILL"):
        alone.cpu()


def test_the_result_of_a_call_that_failed_raises_what_it_raised():
    y = tp.pmap(lambda x, k: x[k], compile=EAGER)(torch.ones(4, 3), torch.tensor([0, 9, 0, 0]))
    tp.resize(2)
    with pytest.raises(IndexError, match="index out of range"):
        y.cpu()


def test_a_gradient_that_began_before_says_that_its_devices_are_gone():
    w = tp.replicate(X).requires_grad_()
    loss = tp.pmap(lambda w: w.sin().sum(), in_axes=None, axis_size=4)(w).sum()
    tp.resize(2)
    with pytest.raises(tp.RuntimeClosed, match=r"before torchpmap.shutdown\(\)"):
        loss.backward()
    assert torch.equal(w.detach().cpu(), X)


def test_a_failure_on_the_way_changes_nothing():
    x, cut, pids = tp.replicate(X), tp.shard_batch(X), worker_pids()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_fds() + 3, limits[1]))
    try:
        with pytest.raises((OSError, tp.PmapError), match=r"Too many open files|ulimit -n"):
            tp.resize(3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert worker_pids() == pids
    assert tp.device_count() == 4
    assert torch.equal((x + cut).cpu(), X + X)


_SURE = (*NO_HANDLER, "ending.surely")
"""The last one is not looked at: Ctrl-C would have to come twice in a microsecond."""


def puts_another_pool(code):
    """Whether code puts one pool for another."""
    ours = current.change.__code__, Pool.reopen.__code__
    return code.co_name in ("switch", "settle") or code in ours


def interrupt_at(number, times, function):
    return interrupted_at(number, function, puts_another_pool, times=times, sure=_SURE)


@pytest.mark.timeout(400)  # a pool is put for another some sixty times
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_any_line_leaves_the_old_devices_or_the_new_ones(times):
    x, cut, found, number = tp.replicate(X), tp.shard_batch(X), set(), 0
    goal, fds = 3, {}
    while True:
        number += 1
        was_interrupted = interrupt_at(number, times, lambda: tp.resize(goal))  # noqa: B023
        n = tp.device_count()
        assert torch.equal((x + cut).cpu(), X + X)
        assert len(worker_pids(n)) == n
        assert num_fds() <= fds.setdefault(n, num_fds()) + 8
        if not was_interrupted:
            break
        found.add(n == goal)
        goal = 7 - n
    assert found == {False, True}


def test_ctrl_c_while_a_pool_is_read_that_was_given_up_leaves_it_so():
    copies, number = tp.replicate(X).block_until_ready(), 0
    pool = lose_for_good(2)
    while not pool.ended:
        assert pool.closed_because is not None
        number += 1
        interrupt_at(number, 1, lambda: tp.resize(3))
    assert number > 10
    assert torch.equal(copies.cpu(), X)
    assert tp.device_count() == 3


def test_calls_and_batches_of_other_threads_go_on():
    """Calls wait for the new devices; what ``prefetch`` has loaded moves too.  The result of a call
    that had begun just before may be lost, which it says.
    """
    f = eagerly(lambda x: tp.psum(x, "i"), "i", in_axes=None, axis_size=1)
    over, results = threading.Event(), []

    def call():
        while not over.is_set():
            with contextlib.suppress(tp.RuntimeClosed):
                results.append(f(torch.ones(())).item())

    batches = [torch.arange(12.0) + k for k in range(6)]
    with beside(call):
        try:
            for k, batch in enumerate(tp.prefetch(batches)):
                tp.resize(3 - k % 2)
                assert torch.equal(batch.cpu(), batches[k])
            assert wait_for(lambda: results)
        finally:
            over.set()
    assert set(results) == {1.0}


def test_writes_of_other_threads_wait_for_it():
    w, v, over = tp.replicate(torch.zeros(3)), tp.replicate(torch.zeros(3)), threading.Event()
    add, counts = tp.jit(lambda: v.add_(1), compile=EAGER), [0, 0]

    def write(k, act):
        while not over.is_set():
            act()
            counts[k] += 1

    with beside(lambda: write(0, lambda: w.add_(1))), beside(lambda: write(1, add)):
        try:
            for k in range(6):
                before = list(counts)
                assert wait_for(lambda before=before: all(map(operator.lt, before, counts)))
                tp.resize(3 - k % 2)
        finally:
            over.set()
    assert [w.tolist(), v.tolist()] == [[count] * 3 for count in counts]


def test_prefetch_may_write_while_it_places_a_batch():
    seen = tp.replicate(torch.zeros(()))

    def put(batch):
        seen.add_(1)
        return tp.shard_batch(batch)

    for k, batch in enumerate(tp.prefetch([torch.ones(6)] * 8, put=put)):
        assert batch.sum().item() == 6
        tp.resize(3 - k % 2)
    assert seen.item() == 8


def amid_a_change(act):
    def carry(old, new):
        act(old)
        return lambda is_new: None

    current.change(2, carry)


def test_a_finalizer_in_a_thread_that_it_waits_for_is_refused():
    x, refused = tp.replicate(X), Future()

    def finalizer():
        try:
            tp.pmap(torch.sin, in_axes=None, axis_size=1)(x)
        except RuntimeError as error:
            refused.set_result(str(error))

    def act(old):
        old._pool.monitor.soon(finalizer)
        assert "in one of torchpmap's own threads" in refused.result(10)

    amid_a_change(act)


def test_a_child_that_another_thread_forks_meanwhile_waits_for_no_lock():
    x, codes = tp.replicate(X), []

    def fork():
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            for use in (x.cpu, lambda: tp.replicate(X)):
                with contextlib.suppress(tp.RuntimeClosed):
                    use()
                    os._exit(1)
            os._exit(0)
        codes.append(os.waitpid(child, 0)[1])

    amid_a_change(lambda old: in_threads(1, lambda k: fork()))
    assert codes == [0]


def test_it_waits_for_a_checkpoint_that_workers_write(tmp_path):
    """They would end in the middle of it."""
    x = tp.replicate(torch.arange(1 << 24))
    saving = tp.checkpoint.save(tmp_path / "all", {"x": x}, asynchronous=True)
    x.delete()
    tp.resize(2)
    saving.wait()
    loaded = tp.checkpoint.load(tmp_path / "all")["x"]
    assert torch.equal(loaded.cpu(), torch.arange(1 << 24))


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "none": (0, ValueError, "from 1 to 256, but got 0"),
    "bool": (True, TypeError, "the number of devices, or a list .* but got True"),
    "text": ("2", TypeError, "the number of devices, or a list .* but got '2'"),
    "empty": ([], TypeError, r"but got \[\]"),
    "twice": ([0, 0], ValueError, "a device is listed twice"),
    "unknown": ([0, 7], ValueError, "is not in use"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_choice_of_devices(case):
    given, kind, match = REFUSED[case]
    if isinstance(given, list):
        platform = tp.devices()[0].platform
        given = [tp.Device(k, platform) for k in given]
    with pytest.raises(kind, match=match):
        tp.resize(given)
    assert tp.device_count() == 4


def test_where_it_cannot_be_called():
    with pytest.raises(RuntimeError, match="in a function that is being traced"):
        tp.jit(lambda x: [tp.resize(2), x + 1][1])(tp.replicate(X))
    with tp.debug.fake_pmap(), pytest.raises(RuntimeError, match="with the runtime 'inline'"):
        tp.resize(2)
    assert tp.device_count() == 4


def test_a_mesh_of_devices_that_are_gone_is_refused():
    old = mesh(4)
    sharding = tp.NamedSharding(old, tp.P("a"))
    f = tp.shard_map(lambda x: x, mesh=old, in_specs=tp.P("a"), out_specs=tp.P("a"))
    g = tp.pmap(lambda x: x, devices=tp.devices())
    h = tp.jit(lambda x: tp.with_sharding_constraint(x + 1, sharding))
    tp.resize(2)
    x = tp.replicate(X)
    uses = (lambda: tp.device_put(X, sharding), lambda: f(X), lambda: g(X[:4]), lambda: h(x))
    for use in uses:
        with pytest.raises(ValueError, match=r"cpu:[23]\)? "):
            use()
    with pytest.raises(ValueError, match="has 4 devices, but there are 2"):
        mesh(4)
