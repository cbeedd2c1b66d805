"""Covers: _sharded/operations.py, gather_report.py: plans, errors, settings, gradients."""

import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from _sharded_values import (
    HERE,
    HOST,
    OF_VALUES,
    WHOLE,
    each,
    fetched_bytes,
    functions,
    numbers,
    on_devices,
    on_mesh,
    where,
)
from _spies import asked
from _support import (
    DEVICE,
    EAGER,
    autocast,
    live_tensors,
    running_pool,
    wait_for,
    worker_pids,
)

import torchpmap as tp
from torchpmap._runtime import current
from torchpmap._sharded import operations
from torchpmap._sharded.arguments import Slot
from torchpmap._sharded.on_blocks import OnBlocks, described
from torchpmap._sharded.rules.signature import Placement
from torchpmap._sharded.trial import tried

pytestmark = pytest.mark.usefixtures("pool")

of_cpus = pytest.mark.skipif(DEVICE != "cpu", reason="GPUs refuse other things than CPUs")


@pytest.fixture(scope="module", autouse=True)
def no_losses():
    tp.shutdown()  # a pool that has lost a worker keeps no numbers on its devices


# Plans -------------------------------------------------------------------------------------------


def defined(calls):
    return sum(name == "define" for name, _ in calls)


def test_one_plan_for_all_numbers(monkeypatch):
    values = on_devices()
    values.x.mul(0.5)
    calls = asked(monkeypatch)
    for number in (0.25, -0.0, 0.0, math.inf, 1e300, 3.5):
        result = values.x.mul(number)
        torch.testing.assert_close(result.cpu(), HERE.x.mul(number), equal_nan=True)
        known = ~result.cpu().isnan()  # a NaN may have either sign
        assert torch.equal(result.cpu().signbit() & known, HERE.x.mul(number).signbit() & known)
    assert defined(calls) == 0
    for number in (True, 2, 2.0, 2j):  # but the kind of number decides the dtype
        assert (values.ints * number).dtype == (HERE.ints * number).dtype


def test_a_number_is_sent_once(monkeypatch):
    values = on_devices()
    values.x.mul(0.125)
    calls = asked(monkeypatch)
    for _ in range(3):
        values.y.mul(0.125)
    assert [name for name, _ in calls] == ["execute"] * 3


def test_kept_plans_are_bounded(monkeypatch):
    values = on_devices()
    monkeypatch.setattr(operations, "_MAX_OPERATIONS", 8)
    monkeypatch.setattr(operations, "_MAX_NUMBERS", 8)
    known = current.runtime()._plans.defined
    before = len(known)
    for size in range(1, 40):
        values.flat.expand(size, 4)
        values.flat + size
    kept = operations._known[values.flat._handle.team]
    assert len(kept.operations) <= 8
    assert len(kept.numbers) <= 8
    assert wait_for(lambda: len(known) <= before + 8)
    torch.testing.assert_close((values.flat + 39).cpu(), HERE.flat + 39)


def test_results_are_freed_on_the_devices():
    x = tp.device_put(torch.zeros(4, 65432), tp.devices())
    assert live_tensors(65432) == [1] * 4
    for _ in range(20):
        x = (x + 1).clamp(0, 3)
    assert live_tensors(65432) == [1] * 4
    x += 1
    x[:, None]
    assert live_tensors(65432) == [1] * 4
    del x
    assert live_tensors(65432) == [0] * 4


def test_results_feed_mapped_functions_without_a_move(monkeypatch):
    f = tp.pmap(lambda row, w: row @ w, in_axes=(0, None), compile=EAGER)
    values, w = on_devices(), tp.replicate(HERE.w[:, :3])
    again = f(values.x, w)
    calls = asked(monkeypatch)
    result = f(values.x * 2, w + 1)
    assert {name for name, _ in calls} <= {"define", "execute", "put"}
    assert [what for name, what in calls if name == "put" and what[0].numel() > 1] == []
    calls.clear()
    for _ in range(3):
        again = f(again, w)
    assert [name for name, _ in calls] == ["execute"] * 3
    w = HERE.w[:, :3]
    torch.testing.assert_close(result.cpu(), (HERE.x * 2) @ (w + 1))
    torch.testing.assert_close(again.cpu(), HERE.x @ w @ w @ w @ w)


def test_some_of_the_devices(monkeypatch):
    chosen = tp.devices()[1:3]
    x = tp.device_put(torch.arange(4.0).reshape(2, 2), chosen)
    calls = asked(monkeypatch)
    result = (x - x.mean(0)).sum(0) + x.amax()
    assert fetched_bytes(calls) == 0
    assert result.devices() == set(chosen)
    assert result.tolist() == [3.0, 3.0]
    one = tp.device_put(torch.arange(3.0), tp.devices()[2])
    assert (one.flip(0).cumsum(0) - one.sort().values).tolist() == [2.0, 2.0, 1.0]
    assert one.cumsum(0).devices() == {tp.devices()[2]}
    mixed = x.sum(1) * one[:2]  # on different devices
    assert where(mixed) == HOST
    assert mixed.tolist() == [0.0, 5.0]


# Errors ------------------------------------------------------------------------------------------


WRONG = """
    x + rows; x @ rows; x.view(5, 5); x.sum(7); x.permute(0, 1); torch.cat([x, rows])
    ints.add(1, alpha=0.5); bytes.fill_(300); ints**-1; ints.div_(2); bias.add_(x)
    x.expand(5, 2, 3); x.select(1, 4); x.softmax(5); ~x
"""


@each("function", OF_VALUES, WRONG)
def test_errors_are_torchs_own_and_nothing_is_gathered(function, monkeypatch):
    def error_of(values):
        try:
            return function(**vars(values))
        except Exception as error:
            return type(error), str(error)

    expected = error_of(HERE)
    assert type(expected) is tuple
    values = on_devices()
    calls = asked(monkeypatch)
    assert error_of(values) == expected
    assert {name for name, _ in calls} <= {"execute", "define"}  # as of x.view() in x @ rows
    assert values.x.sum().item() == HERE.x.sum().item()


def with_grad(x, grad):
    parameter = torch.nn.Parameter(x)
    parameter.grad = grad
    return parameter


MIXED = """
    there + gone.same; gone.same + there; torch.lerp(there, there, gone.same)
    torch.lerp(there, gone.same, 0.5); torch.addcmul(there, there, gone.same)
    torch.where(gone.same > 0, there, there); torch.where(there > 0, there, gone.same)
    torch.cat([there, gone.same]); torch.stack([there, there, gone.same], 1)
    torch._foreach_add([there, there], [there, gone.same])
    torch._foreach_add_([there, gone.same], 1.0); torch.add(there, there, out=gone.same)
    torch.add(there, gone.same, out=there); there.add_(gone.same); gone.same.add_(there)
    gone.same.normal_(); gone.same.zero_(); there.copy_(gone.same); there.add(part[:, None])
    there[:, 0].add_(part); there.clamp(min=gone.same); F.linear(there, turned)
    F.layer_norm(there, (3,), there[0, 0], gone.bias)
    F.cross_entropy(v.last.T, v.flat.long(), weight=gone.bias)
    weights(there); rnn(there); there[places]; there.index_select(0, places); there[:, places]
    there.__setitem__((slice(None), 0), part); there.__setitem__(places, 1.0)
    there.__setitem__((slice(None), places), 1.0); there.__setitem__(gone.same > 0, 1.0)
    gone.same.__setitem__(0, 1.0); gone.x.__setitem__(0, 1.0); v.x.__setitem__(0, first)
    torch.einsum("abc,abc->a", there, gone.same); torch.arange(3.0).add(gone.bias)
    torch.nn.utils.clip_grad_norm_([with_grad(there, gone.same)], 1.0)
    torch.func.grad(lambda x: (x * gone.same).sum())(there)
    torch.func.vmap(lambda x, y: x + y)(there, gone.same); tp.device_put(gone.x, v.same.sharding)
    tp.pmap(lambda x: x + first, compile=EAGER)(v.x); tp.pmap(lambda x: x, compile=EAGER)(gone.x)
"""


def test_every_argument_of_an_operation_belongs_to_the_running_pool():
    gone = on_devices()
    of_gone = {
        "gone": gone,
        "part": gone.same[:, 0],
        "turned": gone.w.T,
        "first": gone.same[0],
        "weights": tp.replicate(torch.nn.Linear(3, 2)),
        "rnn": tp.replicate(torch.nn.LSTM(3, 2)),
        "places": tp.replicate(torch.tensor([1, 0])),
    }
    tp.shutdown()
    tp.init(num_devices=4)
    v = on_devices()
    there = v.same
    given = {"v": v, "there": there, "with_grad": with_grad, **of_gone}
    for function in functions(", ".join(given), MIXED).values():
        before = there.cpu()
        with pytest.raises(tp.RuntimeClosed, match="shut down"):
            function(**given)
        assert torch.equal(there.cpu(), before)


def check_refusal(function, here, *there):
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        function(here.clone())
    for value in there:
        with pytest.raises(expected.type) as raised:
            function(value)
        assert str(raised.value).partition("\n")[0] == str(expected.value).partition("\n")[0]


@of_cpus
def test_dtypes_that_a_kernel_refuses_are_refused_before_anything_is_sent(monkeypatch):
    values = on_devices()
    wholes = {name: tp.replicate(getattr(HERE, name)) for name in ("mask", "ints", "z")}
    large = torch.ones(4, 20000, dtype=torch.bool)
    there = on_mesh(large, ("i",)), tp.replicate(large)
    calls = asked(monkeypatch)
    for name, text in (
        ("mask", "x.argmax(); x.argmax(1); x.argmin(0); x.relu(); x - 1.5; x.topk(1, 2)"),
        ("ints", "x.std(1); x.mul_(0.5)"),
        ("ints", "x.__setitem__((slice(None), torch.tensor([0])), torch.tensor(0.5))"),
        ("z", "x.argmax(1); x.sort(1); x.clamp(min=x)"),
    ):
        for function in functions("x", text).values():
            check_refusal(function, getattr(HERE, name), getattr(values, name), wholes[name])
    for function in functions("x", "x.relu(); F.gelu(x); x - 1.5; x.fmod(x); x.floor_()").values():
        check_refusal(function, large, *there)
    assert not {name for name, _ in calls} - {"fetch"}
    whole = values.ints // values.ints.abs().add(1)
    torch.testing.assert_close(whole.cpu(), HERE.ints // HERE.ints.abs().add(1))
    assert type(whole) is tp.ShardedTensor


@of_cpus
def test_an_error_on_the_devices_is_raised_where_the_result_is_used():
    result = tp.device_put(torch.arange(4), tp.devices()) // tp.replicate(torch.tensor(0))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        result.cpu()


def test_operations_after_the_death_of_a_worker():
    values = on_devices()
    assert (values.x.mul(0.75) + values.x.sum()).cpu().isfinite().all()  # its plans and numbers
    victim = worker_pids()[1]
    os.kill(victim, signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)
    with pytest.raises(tp.ShardLost, match=f"{DEVICE}:1"):
        values.x.mul(0.75)
    fresh = on_devices()
    result = fresh.x.mul(0.75) + fresh.x.sum()
    torch.testing.assert_close(result.cpu(), HERE.x * 0.75 + HERE.x.sum())


# Settings ----------------------------------------------------------------------------------------


SETTINGS = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "a smaller default dtype": (torch.set_default_dtype, torch.bfloat16, torch.float32),
    "flush denormal": (torch.set_flush_denormal, True, False),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "precision of products": (torch.set_float32_matmul_precision, "medium", "highest"),
}
OF_CPUS = {"flush denormal"}
OPERATIONS = """
    ints / 2; ints * 0.1; ints.cos(); ints.mul(x); (x + ints).sum(); (ints * 0.3).mean(0)
    rows.T @ rows; x.double() * 1e-310
"""


@pytest.mark.parametrize("setting", SETTINGS if DEVICE == "cpu" else set(SETTINGS) - OF_CPUS)
@each("operation", OF_VALUES, OPERATIONS)
def test_operations_follow_the_settings_around_them(operation, setting):
    """... those that have run under others too, and without a gather."""
    write, value, usual = SETTINGS[setting]
    values = on_devices()
    try:
        for now in (usual, value, usual):
            write(now)
            expected, result = operation(**vars(HERE)), operation(**vars(values))
            write(usual)
            assert where(result) != HOST, now
            torch.testing.assert_close(result.cpu(), expected, check_dtype=True)
            assert torch.equal(result.cpu() == 0, expected == 0), now
    finally:
        write(usual)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_plan_per_settings(setting, monkeypatch):
    write, value, usual = SETTINGS[setting]
    rows = on_devices().rows
    monkeypatch.setattr(operations, "_known", {})
    calls = asked(monkeypatch)
    found = []
    for now in (usual, value, usual, value):
        try:
            write(now)
            rows.square()
        finally:
            write(usual)
        found.append(defined(calls))
    assert found == [1, 2, 2, 2]


def test_inference_mode(monkeypatch):
    values = on_devices()
    calls = asked(monkeypatch)
    with torch.inference_mode():
        result = F.linear(values.x, values.w.T).reshape(4, 10).softmax(1)
    assert fetched_bytes(calls) == 0
    expected = F.linear(HERE.x, HERE.w.T).reshape(4, 10).softmax(1)
    torch.testing.assert_close(result.cpu(), expected)


def test_autocast():
    values = on_devices()
    with autocast(torch.bfloat16):
        result = values.x @ values.w
        expected = HERE.x @ HERE.w
    assert where(result) == 0
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.cpu(), expected)


# Gradients ---------------------------------------------------------------------------------------

LOSSES = """
    (x * w).sum(); (x * w).mean(); (x @ w.T).relu().sum(); ((x @ w.T).softmax(-1) ** 2).sum()
    (x + w[0]).norm(); (F.layer_norm(x, (3,), w[0], w[1]) ** 2).sum()
    (x[:, 0] * x[:, 1] + x[:, :, 1:].sum((1, 2))[:, None]).sum() + w.sum()
    (x * w).amax((0, 2)).sum(); (x * w).logsumexp(0).sum()
    (x.reshape(4, 6).T * 2).T.unflatten(1, (2, 3)).mul(w).sum()
    (torch.cat([x, x * w], 1) ** 2).sum(); (torch.cat([torch.zeros(0), x * w], 1) ** 2).sum()
    (torch.stack(x.unbind(1), 1) * w).square().sum(); (x.double() * w).sum()
    (x.select(0, 1) * w).sum() + (x[2:3, 1] * w[0]).exp().sum() + x[1::2].sin().sum()
"""


@each("loss", "x, w", LOSSES)
def test_gradients_land_where_the_tensors_are(loss, monkeypatch):
    x, w = HERE.x.clone().requires_grad_(), numbers(2, 3).requires_grad_()
    loss(x, w).backward()
    values = on_devices()
    there = values.x.requires_grad_()
    weight = tp.replicate(w.detach()).requires_grad_()
    calls = asked(monkeypatch)
    result = loss(there, weight)
    result.backward()
    assert fetched_bytes(calls) == 0
    assert where(there.grad) == 0
    assert where(weight.grad) == WHOLE
    torch.testing.assert_close(there.grad.cpu(), x.grad)
    torch.testing.assert_close(weight.grad.cpu(), w.grad)
    loss(there, weight).backward()  # gradients add up
    torch.testing.assert_close(there.grad.cpu(), 2 * x.grad)


def test_gradient_of_a_parameter_on_the_host():
    layer = torch.nn.Linear(3, 2)
    (layer(on_devices().x) ** 2).sum().backward()
    grads = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    (layer(HERE.x) ** 2).sum().backward()
    for grad, parameter in zip(grads, layer.parameters(), strict=True):
        torch.testing.assert_close(grad.cpu(), parameter.grad)


OPTIMIZERS = """
    torch.optim.SGD(p, lr=0.1, momentum=0.9); torch.optim.Adam(p, lr=0.1)
    torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)
"""


@each("make", "p", OPTIMIZERS)
def test_optimizers_step_on_the_devices(make, monkeypatch):
    here, there = HERE.x.clone().requires_grad_(), on_devices().x.requires_grad_()
    first, second = make([here]), make([there])
    for step in range(4):
        calls = asked(monkeypatch)
        for parameter, optimizer in ((here, first), (there, second)):
            optimizer.zero_grad()
            ((parameter - 1) ** 2).mean().backward()
            optimizer.step()
        assert fetched_bytes(calls) == 0
        if step > 1:  # what changes from step to step are numbers
            assert defined(calls) == 0
        monkeypatch.undo()
    torch.testing.assert_close(there.detach().cpu(), here.detach())


# Reports -----------------------------------------------------------------------------------------


def test_gathers_are_reported():
    values = on_devices()
    with tp.debug.report_gathers() as outer:
        values.x.sum().item()
        print(values.x * 2)
        with tp.debug.report_gathers() as inner:
            values.x.cumsum(0)
            torch.cat([values.x, values.y, values.x])
        values.flat.flip(0)
    assert [(g.name, g.num_bytes) for g in inner] == [
        ("aten.cumsum.default", 96),
        ("aten.cat.default", 288),
    ]
    assert outer[:2] == inner
    assert [g.name for g in outer[2:]] == ["aten.flip.default"]
    line = outer[2].where.rpartition(":")
    assert line[0] == __file__
    assert "values.flat.flip(0)" in Path(__file__).read_text().splitlines()[int(line[2]) - 1]
    values.x.cumsum(0)
    assert len(outer) == 3


def test_blocks_that_come_out_in_other_shapes_do_not_fit():
    """Whatever a rule says, what a device makes is compared with the block of the result."""
    func, arguments = torch.ops.aten.sum.dim_IntList, {"self": Slot(0), "dim": [0]}
    trial = tried(func, arguments, [torch.empty(8, 4)])
    rows, columns = ((0,),), ((), (0,))
    for cut, result, fits in ((columns, rows, True), (rows, rows, False), (columns, (), False)):
        call = described(trial, (4,), {0: cut})
        assert OnBlocks(trial, call, Placement({0: cut}, (result,), (None,))).fits() is fits
