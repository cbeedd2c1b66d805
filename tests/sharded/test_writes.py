"""Covers: _sharded/host.py, memory.py: what is written to is written; no other memory is."""

import copy
import re

import pytest
import torch
import torch.utils._pytree as pytree
from _sharded_values import each, functions, numbers, on_mesh
from _support import DEVICE, EAGER, TEST_ALL
from _writing_operators import copied, mapped, run, sample, writing_operators

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

OPERATORS = writing_operators()
NAMED = [
    *("_amp_foreach_non_finite_check_and_unscale_.default", "_amp_update_scale_.default"),
    *("_foreach_add_.List", "_foreach_copy_.default", "_fused_adam_.default"),
    *("_fused_moving_avg_obs_fq_helper.default", "_fused_sgd_.default"),
    *("_native_batch_norm_legit.default", "add.out", "cumsum.out", "embedding_renorm_.default"),
    *("index_put_.default", "kron.out", "linalg_matrix_rank.out", "max.dim_max"),
    *("native_batch_norm.default", "normal_.default", "rrelu_with_noise.default", "sort.values"),
]
"""Tested always; of the others every 30th."""


def name_of(func):
    return str(func).removeprefix("aten.")


CHOSEN = [
    func
    for number, func in enumerate(OPERATORS)
    if TEST_ALL or number % 30 == 0 or name_of(func) in NAMED
]


def same(result, expected, rtol=1e-5):
    assert torch.is_tensor(result)
    torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=rtol, atol=1e-6)


def cut(x):
    """A row, or several, per device; whole if there are none."""
    if x.ndim and x.shape[0] == 4:
        return tp.device_put(x, tp.devices())
    return tp.replicate(x)


PLACES = {
    "cut": (cut, cut),
    "whole": (tp.replicate, tp.replicate),
    "cut, others whole": (cut, tp.replicate),
    "whole, others cut": (tp.replicate, cut),
    "plain, others cut": (torch.clone, cut),
    "cut, others plain": (cut, torch.clone),
}
"""Where the written operands are, and the others."""


def attempt(func, given):
    try:
        return run(func, given), None
    except RuntimeError as error:
        return None, error


def tensors(given, name):
    return [x for x in pytree.tree_leaves(given[name]) if isinstance(x, torch.Tensor)]


def written_names(func, given, after):
    """The arguments that plain torch has written to, whatever the schema says."""
    changed = {
        name
        for name in given
        for x, now in zip(tensors(given, name), tensors(after, name), strict=True)
        if not torch.equal(x, now)
    }
    declared = {
        a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    return changed | declared


@pytest.mark.parametrize("func", CHOSEN, ids=str)
def test_what_an_operator_writes_is_written(func):
    try:
        check_what_is_written(func)
    except NotImplementedError:  # of the kernel, where the values are used
        if DEVICE == "cpu":
            raise
        pytest.skip("GPUs have no such kernel")


def check_what_is_written(func):
    given = sample(func)
    if given is None:
        assert name_of(func) not in NAMED
        pytest.skip("no arguments known")
    expected = copied(given)
    result = run(func, expected)
    names = written_names(func, given, expected)
    for place, (place_written, place_others) in PLACES.items():
        there = mapped(
            lambda name, x, w=place_written, o=place_others: (w if name in names else o)(x), given
        )
        got, error = attempt(func, there)
        if error is not None:
            # the last one: mse_loss and its kind resize out= on their way
            assert re.search("in place|the out-of-place operation|not resizable", str(error))
            continue
        for name in given:
            torch.testing.assert_close(
                [x.cpu() for x in tensors(there, name)],
                tensors(expected, name),
                rtol=1e-4,
                atol=1e-4,
                equal_nan=True,
                msg=lambda text, name=name, place=place: f"{name}, {place}: {text}",
            )
        for x, right in zip(pytree.tree_leaves(got), pytree.tree_leaves(result), strict=True):
            if isinstance(right, torch.Tensor) and not str(func).startswith("aten.empty"):
                torch.testing.assert_close(x.cpu(), right, rtol=1e-4, atol=1e-4, equal_nan=True)


# Operators that write to several tensors ---------------------------------------------------------


LISTS = """
    ([x, x], 1.0); ([x, x.detach()], 1.0); ([x[:, 0], x[:, 1]], 1.0); ([x[1:3], x[3:]], 1.0)
    ([x, x.T], 1.0); ([x, y := x * 2], [y, x])
"""


@pytest.mark.parametrize("put", [cut, tp.replicate])
@each("pick", "x", LISTS)
def test_lists_of_tensors_that_share_a_value(put, pick):
    here, there = numbers(4, 4), put(numbers(4, 4))
    (written, other), (plain, plain_other) = pick(there), pick(here)
    torch._foreach_add_(written, other)
    torch._foreach_add_(plain, plain_other)
    same(there, here)
    for x, right in zip(written, plain, strict=True):
        same(x, right)


@pytest.mark.filterwarnings("ignore:InstanceNorm1d is on the devices")
def test_layers_write_their_statistics():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.BatchNorm1d(3), torch.nn.InstanceNorm1d(3, track_running_stats=True)
    )
    model = copy.deepcopy(plain)._apply(tp.replicate)
    for _ in range(3):
        x = torch.randn(4, 3, 5) * 3 + 5
        same(model(cut(x)), plain(x))
    for name, right in plain.state_dict().items():
        same(model.state_dict()[name], right)
    twin, before_last = model[0].running_mean.clone(), plain[0].running_mean.clone()
    same(model[0](tp.replicate(x)), plain[0](x))
    same(twin, before_last)
    before = model[0].running_mean.tolist()
    same(model[0].eval()(tp.replicate(x)), plain[0].eval()(x))
    assert model[0].running_mean.tolist() == before


IN_PLACE = """
    F.relu(x - 0.5, inplace=True); F.relu_(x); F.dropout(x, 0.5, inplace=True)
    F.rrelu(x, training=True, inplace=True); F.threshold_(x, 0.0, 1.0); F.normalize(x, out=x)
    F.embedding(torch.tensor([1, 2]), x, max_norm=1.0); nn.init.orthogonal_(x)
"""


def test_functions_write_in_place():
    for write in functions("x", IN_PLACE).values():
        for put in (cut, tp.replicate):
            here, there = numbers(4, 4), put(numbers(4, 4))
            torch.manual_seed(0)
            expected = write(here)
            torch.manual_seed(0)
            same(write(there), expected)
            same(there, here)


def test_gradients_of_written_rows():
    x = cut(torch.zeros(4, 2))
    w = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        x[0] = w * 2
    assert x[0].tolist() == [2, 2]
    assert not x.requires_grad
    x[1] = w * 3
    x[:, 1] = w[0] * 5
    (x * cut(numbers(4, 2))).sum().backward()
    (other,) = torch.autograd.grad((w * torch.tensor([3.0, 0])).dot(numbers(4, 2)[1]), w)
    expected = other + torch.tensor([5 * numbers(4, 2)[:, 1].sum(), 0])
    same(w.grad, expected)


def test_rows_written_after_they_were_saved_raise():
    x, w = cut(numbers(4, 2)), cut(torch.ones(4, 2)).requires_grad_()
    y = (w * x).sum()
    x[0] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_views_in_inference_mode_share_values():
    x = cut(numbers(4, 2))
    with torch.inference_mode():
        part = x[1:].T
        part.mul_(2)
        inside = (x * 1)[:, 0]
    assert inside.is_inference()
    assert not part.is_inference()
    expected = numbers(4, 2)
    expected[1:] *= 2
    same(x, expected)
    same(part, expected[1:].T)


# What cannot be written ---------------------------------------------------------------------------


OUT_OF_RANGE = """
    x.index_put_((i,), torch.tensor(1.0)); x.__setitem__(-i - 1, 1.0); x.__setitem__((ALL, i), 1.0)
    x.__setitem__((i * 0, i), 1.0); x.index_add_(0, i, numbers(2, 4)); x.index_fill_(-1, i, 1.0)
    x.index_add_(1, 5 - i, numbers(4, 2)); x.index_copy_(0, i, numbers(2, 4))
    x.put_(i * 4, numbers(2)); x.scatter_(1, i[None].expand(2, 2), 1.0)
    x.scatter_add_(0, i[:, None], numbers(2, 1))
    x.scatter_reduce_(0, i[:, None], numbers(2, 1), "amax")
"""


def test_a_write_to_places_that_do_not_exist_leaves_the_value():
    places = torch.tensor([1, 6])
    for name, write in functions("x, i, ALL=slice(None)", OUT_OF_RANGE).items():
        with pytest.raises((IndexError, RuntimeError)):
            write(numbers(4, 4), places)
        for spec in (("i",), (None, "i"), ()):
            x = on_mesh(numbers(4, 4), spec)
            with pytest.raises(
                IndexError, match=r"index -?\d+ is out of bounds for dimension [01]"
            ):
                write(x, places)
            assert torch.equal(x.cpu(), numbers(4, 4)), (name, spec)
    x = cut(numbers(4, 4))
    x.index_add_(0, tp.replicate(places), numbers(2, 4))  # its numbers are not known here
    with pytest.raises(RuntimeError) as raised:
        x.cpu()
    assert any("aten.index_add_.default" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("place", [torch.tensor(2.0), torch.tensor([1.0]), torch.tensor([1j])])
def test_a_write_to_places_that_are_no_integers_leaves_the_value(place):
    host, x = numbers(4, 4), cut(numbers(4, 4))
    for index in (place, (slice(None), place), tp.replicate(place)):
        with pytest.raises(IndexError) as raised:
            x[index] = 7
        with pytest.raises(IndexError, match=re.escape(str(raised.value))):
            host[place] = 7
    assert torch.equal(x.cpu(), host)


OVERLAPPING = """
    x.add_(x.T); x.copy_(x.T); x.T.copy_(x); x.lerp_(x.T, 0.5); x.__setitem__(ALL, x.T)
    torch.add(x, 1, out=x.T); torch.cumsum(x.T, 0, out=x); x.index_copy_(0, i, x[1:3])
    x.index_add_(0, i, x[2:]); x[1:].add_(x[:-1]); x[0].mul_(x[0, 1])
    torch._foreach_add_([x], [x.T])
    x.masked_fill_(x > 1, x[0, 1]); x.fill_(x[1, 1]); x.index_fill_(0, i, x[1, 1]); x.add_(x)
    x.masked_scatter_(x > 0, x.T); x.mul_(x.detach()); x.T.add_(x.T); x.view(4, 4).mul_(x)
    x[:2].add_(x[2:]); x[:, :2].add_(x[:, 2:]); x[:, 0].add_(x[:, 1]); x.T.add_(x.T.clone())
"""


@each("write", "x, i, ALL=slice(None)", OVERLAPPING)
def test_a_write_to_what_is_read_raises_where_torch_raises(write):
    """... which is if a part is read, or all in another order of dims."""
    outcomes = []
    for put in (torch.clone, tp.replicate, lambda x: on_mesh(x, (None, "i"))):
        x = put(numbers(4, 4))
        try:
            write(x, torch.tensor([0, 1]))
        except RuntimeError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(x.tolist())
    assert outcomes[0] == outcomes[1] == outcomes[2]  # values, or torch's texts


# Another value ------------------------------------------------------------------------------------


def test_data_names_the_value_of_another():
    w = tp.replicate(torch.zeros(3)).requires_grad_()
    value = tp.replicate(torch.ones(3))
    version = w._version
    w.data = value
    assert (w.tolist(), w._version, w.is_leaf, w.requires_grad) == ([1, 1, 1], version, True, True)
    value += 1
    w.data.mul_(2)
    assert w.tolist() == value.tolist() == [4, 4, 4]
    (w * 2).sum().backward()
    assert w.grad.tolist() == [2, 2, 2]
    value.data = cut(torch.ones(4, 2, dtype=torch.float64))  # of another shape and layout
    assert (value.dtype, value.sharding.spec) == (torch.float64, tp.P("devices"))
    same(value + 1, torch.full((4, 2), 2.0, dtype=torch.float64))


def test_views_keep_the_value_that_was_replaced():
    here, there = numbers(4, 2), cut(numbers(4, 2))
    results = []
    for x in (here, there):
        column, alias, part = x[:, 0], x.detach(), x.T
        part.data = torch.zeros_like(part)  # no longer a view of x
        part += 5
        x.data = torch.ones_like(x)
        alias += 1
        column *= 3
        x += 1
        results.append((x, column, alias, part))
    for got, right in zip(*reversed(results), strict=True):
        same(got, right)
    there.data = there
    there.data = there.data
    same(there, here)


def test_data_of_another_kind_raises():
    x, plain = tp.replicate(torch.zeros(3)), torch.zeros(3)
    with pytest.raises(TypeError, match=r"must be a ShardedTensor, but got a Tensor"):
        x.data = plain
    for tensor in (plain, torch.nn.Parameter(torch.zeros(3))):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            tensor.data = x
    with pytest.raises(RuntimeError, match="different slots"):
        torch.utils.swap_tensors(plain, x)
    for target in (plain, x):
        with pytest.raises(RuntimeError, match=r"x.data = y, or copy it: x.copy_"):
            target.set_(tp.replicate(torch.ones(3)))
    plain.data = torch.ones(3)
    assert plain.tolist() == [1, 1, 1]


def test_modules_are_moved_to_the_devices():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    x = torch.randn(4, 3)
    plain(x).square().sum().backward()
    model = copy.deepcopy(plain)
    model[0].weight.grad = plain[0].weight.grad.clone()
    model._apply(tp.replicate)
    for name, parameter in model.named_parameters():
        assert type(parameter) is tp.ShardedTensor, name
        assert isinstance(parameter, torch.nn.Parameter), name
        assert parameter.requires_grad, name
    same(model[0].weight.grad, plain[0].weight.grad)
    model.double()
    same(model(cut(x.double())), plain.double()(x.double()), rtol=1e-6)


# Copies and descriptions --------------------------------------------------------------------------


def test_copies_share_or_do_not_share_as_in_torch():
    for x in (numbers(4, 2), cut(numbers(4, 2))):
        x.requires_grad_()
        x.sum().backward()
        x.note = ["kept"]
        shallow, deep = copy.copy(x), copy.deepcopy(x)
        assert type(shallow) is type(deep) is type(x)
        assert (shallow.requires_grad, deep.requires_grad) == (True, True)
        assert (shallow.note is x.note, deep.note is x.note) == (True, False)
        assert (deep.note, shallow.grad) == (["kept"], None)
        assert deep.grad.tolist() == x.grad.tolist()
        with torch.no_grad():
            shallow.zero_()
        assert x.tolist() == [[0, 0]] * 4
        assert deep.tolist() == numbers(4, 2).tolist()
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(x * 2)


def test_values_of_a_closed_pool_can_be_looked_at():
    x, loss = cut(numbers(4, 2)), tp.replicate(torch.tensor(1.0))
    tp.shutdown()
    for text in (repr(x), str(x), f"{x}", str([x])):
        assert f"shape=[4, 2], dtype=torch.float32, rows of dim 0 on {DEVICE}:0" in text
        assert "which were shut down: the data is gone" in text
    assert "the data is gone" in f"{loss:.3f}"
    assert {x: 1}[x] == 1
    assert (x.shape, x.data.dtype, x.devices() != set()) == ((4, 2), torch.float32, True)
    uses = [x.to_host, loss.item, x.block_until_ready, x.sum]
    for use in (*uses, lambda: x + 1, lambda: x[0], lambda: x.cumsum(0)):
        with pytest.raises(tp.RuntimeClosed, match="the pool of devices was shut down, and"):
            use()


# Memory -------------------------------------------------------------------------------------------


TAKE = """
    x.share_memory_(); x.set_(torch.zeros(3)); torch.zeros(3).set_(x)
    nn.ParameterList([x]).share_memory(); torch.utils.dlpack.to_dlpack(x)
"""


@each("take", "x", TAKE)
def test_memory_is_refused(take):
    with pytest.raises(RuntimeError, match=r"no memory in this process|access data pointer"):
        take(tp.replicate(torch.ones(3)))


# torch.compile ------------------------------------------------------------------------------------


def branches(x):
    y = x.sin() + x
    return y * 2 if y.sum() > 0 else y


def writes_rows(x):
    x[0] += 1
    x[1].mul_(2)
    for row in x:
        row -= 1
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1,
        lambda x: (x.softmax(-1) @ x.T).mean(),
        lambda x: (x[0], x.cpu() + 1, x.shape),
        branches,
        torch.nn.Linear(4, 2).requires_grad_(False),
        lambda x: x.add_(1),
        writes_rows,
    ],
)
def test_compiled_functions_run_as_they_are(function):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend=backend)

    for _ in range(2):
        expected = function(numbers(4, 4))
        for got, right in zip(
            pytree.tree_leaves(compiled(cut(numbers(4, 4)))),
            pytree.tree_leaves(expected),
            strict=True,
        ):
            assert right == got if isinstance(right, int) else same(got, right) is None
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    assert sum(node.op.startswith("call") for node in nodes) <= 1  # x.cpu() + 1 is on the host


def test_compiled_functions_differentiate_and_call_mapped_ones():
    x = cut(numbers(4, 4)).requires_grad_()
    torch.compile(lambda x: (x**2).sum(), backend="eager")(x).backward()
    same(x.grad, 2 * numbers(4, 4))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"no compiled frames|[`']ShardedTensor['`]"):
        torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")(cut(numbers(4, 4)))
    double = tp.pmap(lambda x: x * 2, compile=EAGER)
    compiled = torch.compile(lambda x: double(x + 1) - 1, backend="eager")
    for x in (numbers(4, 4), cut(numbers(4, 4))):
        same(compiled(x), (numbers(4, 4) + 1) * 2 - 1)
