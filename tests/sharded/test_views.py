"""Covers: _sharded/views.py: views of ShardedTensors share their values, as torch's views do."""

import gc
import pkgutil
import weakref
from threading import Thread

import pytest
import torch
import torch.nn.functional as functional
from _sharded_values import (
    HERE,
    each,
    fetched_bytes,
    functions,
    nothing_gathers,
    numbers,
    on_devices,
    on_mesh,
)
from _spies import asked
from _support import close

import torchpmap as tp
from torchpmap._sharded import views

pytestmark = pytest.mark.usefixtures("pool")

BLOCKWISE = """
    x.transpose(0, 2); x.permute(2, 0, 1); x.mT; x[:, 1]; x[..., -1]; x[:, :, 1:]; x[:, :, ::2]
    x.narrow(2, 1, 2); x[:, None]; x[:, :1].squeeze(1); x.flatten(1); x.view(4, 3, 2)
    x.unbind(1)[1]; x.split([1, 2], 2)[1]; x.chunk(2, 1)[0]; x.diagonal(0, 1, 2)
    x.view(torch.float32); x.detach(); x.data; x.expand(4, 2, 3)
    x.transpose(1, 2)[:, 1].unsqueeze(0); x.detach().mT.detach()[:, 0]
"""
ACROSS = """
    x[1:3]; x[::2]; x.select(0, 2); x.unbind()[3]; x.transpose(0, 1)[0].view(torch.int32)
    x.split(2)[1]; x.split([1, 3])[1]; x.diagonal(0, 0, 1); x.as_strided((3, 2), (6, 1), 1)
"""
every_view = each("view", "x", BLOCKWISE + ACROSS)


@every_view
def test_a_write_to_a_view_is_a_write_to_the_tensor(view):
    here, there = HERE.x.clone(), on_devices().x
    plain, part = view(here), view(there)
    for x in (plain, part):
        x.add_(10)
        x[...] = x * 2
    torch.testing.assert_close(part.cpu(), plain)
    torch.testing.assert_close(there.cpu(), here)
    for shard in there.addressable_shards:
        torch.testing.assert_close(shard.data, here[shard.index])


@every_view
def test_a_write_to_the_tensor_is_a_write_to_its_views(view):
    there = on_devices().x
    part = view(there)
    writes = """
        x.mul_(3); x[0].shape; x.__setitem__((slice(1, 3), 0), 7.0)
        x.copy_(numbers(4, 2, 3).flip(2)); x.cumsum_(0)
    """
    for write in functions("x", writes).values():
        write(there)
        torch.testing.assert_close(part.cpu(), view(there).cpu())


@each("view", "x", BLOCKWISE)
def test_writes_through_blockwise_views_stay_on_the_devices(view, monkeypatch):
    there = on_devices().x
    part = view(there)
    calls = asked(monkeypatch)
    part.mul_(2)
    there.add_(1)
    assert fetched_bytes(calls) == 0


def test_siblings_and_aliases_see_each_others_writes():
    x = on_devices().x
    alias, columns, row = x.detach(), x[:, 1], x.mT
    deeper = row[:, 0]
    columns.zero_()
    expected = HERE.x.clone()
    expected[:, 1] = 0
    for tensor, right in (
        (x, expected),
        (alias, expected),
        (row, expected.mT),
        (deeper, expected[:, :, 0]),
    ):
        torch.testing.assert_close(tensor.cpu(), right)
    alias.fill_(5)
    assert {value for t in (x, columns, row, deeper) for value in t.cpu().flatten().tolist()} == {5}
    x.delete()
    deeper.fill_(6)  # what is gone is left alone
    assert set(row.cpu()[:, 0].flatten().tolist()) == {6}
    assert set(alias.cpu().flatten().tolist()) == {5}


ROWS = """
    x[2].add_(1); x[-1].mul_(2); x[3, 1].fill_(9); x[3][1].add_(1); x[1][2][0].neg_(); x[0].zero_()
    x[..., 1].add_(1); x[None][0, 1].add_(1); x[2:6][1].add_(1); x[::2][-1].add_(1); x.mT[4].exp_()
    x.select(0, 5).neg_(); x.select(-3, -5).neg_(); x.unbind()[6].add_(1); x.detach()[1].add_(1)
    x[0].copy_(x[7]); x[0].copy_(torch.ones(4, 2)); x[6].mT[1].add_(1); x[4].flatten()[3:5].zero_()
    x.view(2, 4, 8)[1].add_(1); x[torch.tensor(2)].add_(1); x[np.int64(3)].add_(1)
    [row.add_(k) for k, row in enumerate(x)]; [row.mul_(2) for row in [*x]]; [*x][3].copy_(x[-2])
    x.__setitem__(1, x[1].add_(1)); x.__setitem__((-2, 1), x[-2, 1].add_(1)); x.__setitem__(5, 7)
    x.__setitem__(0, x[1]); x.__setitem__((5, 3, 1), x[5, 3, 1] + 2); torch.neg(x[0], out=x[1])
    x.add_(1)
"""
PUT = {
    "4": lambda x: on_mesh(x, "i"),
    "2": lambda x: tp.device_put(x, tp.NamedSharding(tp.make_mesh((2,), ("i",)), tp.P("i"))),
    "1": lambda x: tp.device_put(x, tp.NamedSharding(tp.make_mesh((1,), ("i",)), tp.P("i"))),
    "both dims": lambda x: on_mesh(x, "ij", (2, 2), ("i", "j")),
    "one axis": lambda x: on_mesh(x, "j", (2, 2), ("i", "j")),
    "one dim": lambda x: on_mesh(x, [("j", "i")], (2, 2), ("i", "j")),
    "columns": lambda x: on_mesh(x, (None, "i")),
    "replicated": tp.replicate,
}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
@each("write", "x", ROWS)
def test_rows_and_what_they_are_rows_of_see_each_others_writes(write, put):
    here = numbers(8, 4, 2)
    there = put(here)
    views = [(x[1], x[-3], x[5, 3], x[3][1], x[..., 0], x.select(0, 6)) for x in (here, there)]
    sharding = there.sharding
    for x in (here, there):
        write(x)
    close([there, *views[1]], [here, *views[0]])
    assert there.sharding == sharding
    for shard in there.addressable_shards:
        torch.testing.assert_close(shard.data, here[shard.index])


def test_all_rows_have_one_plan_and_are_sent_alone(monkeypatch):
    here = numbers(64, 8)
    x = tp.shard_batch(here)
    x[0].add_(1)
    calls = asked(monkeypatch)
    with nothing_gathers():
        for k in range(-64, 64):
            x[k].add_(1)
        rows = [*x]
    assert {name for name, _ in calls} == {"put", "execute"}  # a row, or a number
    here += 2
    here[0] += 1
    close([x, *rows], [here, *here])
    assert fetched_bytes(calls) == here.nbytes * 2


@pytest.mark.parametrize("index", [8, -9])
def test_rows_that_are_not_there(index):
    message = f"index {index} (is out of bounds|out of range)"
    x = tp.shard_batch(numbers(8, 4))
    for use in functions("x, k", "x[k]; x.select(0, k); x.select_scatter(x[0], 0, k)").values():
        use(x, 1)
        with pytest.raises(IndexError, match=message):
            use(x, index)


def test_a_write_to_a_row_without_elements():
    x = on_mesh(torch.zeros(8, 0), ("x", "y"), (2, 2), ("x", "y"))
    x[3].add_(1)
    assert [shard.data.shape for shard in x.addressable_shards] == [(4, 0)] * 4


def test_copies_are_independent():
    x = on_devices().x
    twins = [x.clone(), x.contiguous().clone(), x + 0, x.mT.clone(), x[0].clone(), x.cpu()]
    twins.append(x.reshape(24) + 0)
    before = [twin.clone().cpu() for twin in twins]
    x.fill_(9)
    close(twins, before)


def test_mapped_functions_see_writes_through_views():
    f = tp.pmap(lambda row: row * 1, compile={"backend": "eager"})
    x = on_devices().x
    f(x)
    x[:, 1].zero_()
    expected = HERE.x.clone()
    expected[:, 1].zero_()
    assert f(x).tolist() == expected.tolist()


def test_a_detached_tensor_does_not_keep_the_other_alive():
    x = on_devices().x
    alias = x.detach()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert (alias + 1).tolist() == (HERE.x + 1).tolist()


def test_a_detached_view_keeps_no_graph_alive():
    x = on_devices().x.requires_grad_()
    result = x * 2
    part = result[:, 1].detach()
    gone = weakref.ref(result)  # which would hold the graph
    del result
    gc.collect()
    assert gone() is None
    assert part.add_(1).tolist() == (HERE.x[:, 1] * 2 + 1).tolist()


def test_what_cannot_be_written_raises_and_sees_writes():
    expected, x = HERE.x.clone(), on_devices().x
    wide, windows = x[:, :, :1].expand(4, 2, 3), x.unfold(2, 2, 1)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        wide.add_(1)
    message = r"made by aten\.unfold\.default cannot be written to in place; \.clone\(\) the view"
    with pytest.raises(RuntimeError, match=message):
        windows.add_(1)
    torch.testing.assert_close(windows.cpu(), expected.unfold(2, 2, 1))
    for written in (expected, x):
        written[:, 0].add_(1)
    torch.testing.assert_close(wide.cpu(), expected[:, :, :1].expand(4, 2, 3))
    torch.testing.assert_close(windows.cpu(), expected.unfold(2, 2, 1))


def pad_circular(x):
    return functional.pad(x, (1, 1), mode="circular")


def write_whole(x):
    y = x * 2
    part = y[:, 0]
    y.mul_(x)
    return part


def write_view_of_view(x):
    y = x * 2
    part = y[:, 1]
    part[:, 2].mul_(x[:, 0, 0])
    part.exp_()
    return y


def write_siblings(x):
    y = x * 2
    turned, part = y.transpose(1, 2), y[:, 0]
    turned.mul_(x.transpose(1, 2))
    part.sin_()
    return turned * part.sum() + y.transpose(1, 2)


def copy_parts(x):
    y = torch.zeros_like(x)
    y[:, 0].copy_(x[:, 1])
    y[:, 1].add_(x[:, 0] * x[:, 1])
    return y


def assign(x):
    y = x * 1
    y[:, 0] = x[:, 1] * 2
    y[1] = x[0]
    y[:, :, torch.tensor([2, 0])] = y[:, :, :2] * 3
    y[y > 1] = 4.0
    return y


def write_rows(x):
    y = x * 2
    first = y[0]
    first.mul_(x[1])
    y[-1][1].sin_()
    y[2, 0].copy_(x[3, 1])
    return y * first


def write_bits(x):
    y = torch.view_as_complex(torch.stack([x, x], -1))
    y.real.mul_(2)
    y[:, 0].mul_(1j)
    return torch.view_as_real(y)


def write_unrecorded(x):
    y = x * 2
    part = y[:, 0]
    with torch.no_grad():
        part.mul_(2)
    return part * y[:, 1]


WRITING = (
    *(pad_circular, write_whole, write_view_of_view, write_siblings),
    *(copy_parts, assign, write_rows, write_bits, write_unrecorded),
)


def in_backward(function, x):
    y = function(x.requires_grad_())
    y.pow(2).sum().backward()
    return [y.detach(), x.grad]


def by_grad_of_grad(function, x):
    y = function(x.requires_grad_())
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.pow(2).sum(), x)


DERIVATIVES = {
    "backward": in_backward,
    "twice": by_grad_of_grad,
    "grad": lambda function, x: [torch.func.grad(lambda x: function(x).pow(2).sum())(x)],
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x.cos(),)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("function", WRITING, ids=lambda function: function.__name__)
def test_writes_through_views_are_differentiated(function, derivative):
    value = numbers(4, 2, 3).add(0.25).div(8)
    expected = derivative(function, value.clone())
    for put in (tp.shard_batch, tp.replicate, lambda x: on_mesh(x, "ij", (2, 2), ("i", "j"))):
        close(derivative(function, put(value)), expected)


def test_writes_that_torch_forbids_raise_its_errors():
    x = on_devices().x.requires_grad_()
    for view in functions("x", "x[:, 0]; x[1]; x[-1, 0]; x[2][1]").values():
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            view(x).add_(1)
    with pytest.raises(
        RuntimeError, match="is the output of a function that returns multiple views"
    ):
        next(iter(x)).add_(1)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        x[:, 0] = 1
    y = x * 2
    z = y.sin()
    y[:, 0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_shapes_change_in_place():
    here, there = HERE.x.clone(), on_devices().x
    changes = """
        x.transpose_(0, 2); x.unsqueeze_(1); x.squeeze_(1).unsqueeze_(-1); x.squeeze_()
        x[0].shape and x.transpose_(-1, -2); x.mul_(2)
    """
    for change in functions("x", changes).values():
        change(here)
        assert change(there) is there
        assert there.shape == here.shape
        torch.testing.assert_close(there.cpu(), here)
        torch.testing.assert_close((there + 1).sum(0).cpu(), (here + 1).sum(0))
    f = tp.pmap(lambda x: x * 1, in_axes=1, out_axes=1, compile={"backend": "eager"})
    torch.testing.assert_close(f(there).cpu(), here)
    view = there[0]
    alias = there.detach()
    with pytest.raises(RuntimeError, match=r"aten.transpose_.default would change the shape"):
        there.transpose_(0, 1)
    assert view.shape == here[0].shape
    del alias, view
    gc.collect()
    assert there.transpose_(0, 1).shape == here.transpose_(0, 1).shape


def test_gradients_are_no_views():
    x = on_devices().x.requires_grad_()
    for expected in (1, 2):
        x.sum().backward()
        assert set(x.grad.cpu().flatten().tolist()) == {expected}
    x.grad.zero_()
    x.grad[:, 0] += 1
    assert x.grad.sum().item() == 12


def fill_row_of_mask(x):
    x.index_put_((torch.tensor([False, True, False, False]),), torch.ones(3))


def while_another_thread(write, x, monkeypatch, name, act):
    """``act(x)``, in which another thread writes when ``name`` has done its part."""
    place = f"torchpmap._sharded.{name}"
    real = pkgutil.resolve_name(place)
    other = Thread(target=write, args=(x,))

    def held(*given, **options):
        monkeypatch.undo()
        result = real(*given, **options)
        other.start()
        other.join(0.2)  # waits for ``act``, which has read the old value
        return result

    monkeypatch.setattr(place, held)
    result = act(x)
    other.join()
    return result


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("views._laid_out", lambda x: x[1].add_(1)),
        ("tensor.start", lambda x: x.index_fill_(0, torch.tensor([1]), 1)),
        ("tensor.store", lambda x: x.__setitem__(slice(1, 2), 1)),
        ("host.send_again", fill_row_of_mask),
    ],
)
def test_threads_may_write_to_parts_of_one_tensor(monkeypatch, name, write):
    x = on_mesh(torch.zeros(4, 3), ("i",))
    while_another_thread(lambda x: x[2].add_(2), x, monkeypatch, name, write)
    assert x.tolist() == [[0] * 3, [1] * 3, [2] * 3, [0] * 3]


def test_a_link_does_not_undo_what_another_thread_writes(monkeypatch):
    x = on_mesh(torch.zeros(4, 3), ("i",))

    other, write = Thread(target=lambda: x.add_(1)), views.write

    def late(*given):
        monkeypatch.undo()
        other.start()
        other.join(0.2)  # waits for the link, which has read the old value
        write(*given)

    monkeypatch.setattr(views, "write", late)
    views._catch_up(x, None)  # as if another value had been there when the view was taken
    other.join()
    assert x.tolist() == [[1] * 3] * 4


def test_a_reader_does_not_wait_for_a_write(monkeypatch):
    x, y = on_mesh(torch.zeros(4, 3), ("i",)), on_mesh(torch.zeros(4), ("i",))
    has_read = []

    def held(*given):
        monkeypatch.undo()
        reader = Thread(target=lambda: has_read.append((y.detach(), y[1], x.detach())))
        reader.start()
        reader.join(20)
        has_read.append(not reader.is_alive())
        return real(*given)

    real = pkgutil.resolve_name("torchpmap._sharded.views._laid_out")
    row = x[1]
    monkeypatch.setattr("torchpmap._sharded.views._laid_out", held)
    row.add_(1)
    (_, _, whole), is_done = has_read
    assert is_done
    assert whole.tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("tensor.start", lambda x: x[2]),
        ("tensor.make_sharded", lambda x: x.detach()[2]),
        ("tensor.start", lambda x: x.T[:, 2]),
    ],
)
def test_a_view_sees_what_another_thread_writes_while_it_is_taken(monkeypatch, name, view):
    x = on_mesh(torch.zeros(4, 3), ("i",))
    y = while_another_thread(lambda x: x.add_(2), x, monkeypatch, name, view)
    assert y.tolist() == [2, 2, 2]
