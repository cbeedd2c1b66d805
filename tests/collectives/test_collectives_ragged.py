"""Covers: _collectives/ragged.py."""

import numpy as np
import pytest
import torch
from _axis_models import ON_DEVICES, VMAPPED

import torchpmap as tp
from torchpmap._collectives import ragged_all_to_all
from torchpmap._transforms.vmap import vmap

# From the documentation of jax.lax.ragged_all_to_all.
JAX_EXAMPLE = [
    [[1, 2, 2], [3, 4, 0]],
    [[0, 0, 0, 0], [0, 0, 0, 0]],
    [[0, 1], [0, 1]],
    [[1, 2], [1, 1]],
    [[0, 0], [1, 2]],
    [[1, 1], [2, 1]],
]


def model(given, groups=None):
    """The definition: every sender, in order, writes its slices into the results."""
    operand, output, start, size, to, _ = given
    result = output.copy()
    for group in groups or [list(range(len(operand)))]:
        each = start.shape[1] // len(group)
        for sender in group:
            for k in range(start.shape[1]):
                rows = operand[sender][start[sender, k] : start[sender, k] + size[sender, k]]
                place = to[sender, k]
                result[group[k // each]][place : place + len(rows)] = rows
    return result


def random_exchange(num_devices, each, seed, groups=None):
    """Slices with padding between them, empty ones too, which do not overlap on their receivers."""
    random = np.random.default_rng(seed)
    groups = groups or [list(range(num_devices))]
    k = each * len(groups[0])
    shape = (num_devices, k)
    size, start, to = random.integers(0, 4, shape), np.zeros(shape, int), np.zeros(shape, int)
    received = np.zeros(shape, int)
    for group in groups:
        for place, device in enumerate(group):
            gaps = random.integers(0, 2, k)
            start[device] = np.cumsum(size[device] + gaps) - size[device]
            mine = [(j, place * each + c) for j in group for c in range(each)]
            order = random.permutation(len(mine))
            end = 0
            for n in order:
                sender, slot = mine[n]
                end += random.integers(0, 2)
                to[sender, slot] = end
                end += size[sender, slot]
                received[device, n] = size[sender, slot]
    rows = max(int((start + size).max()), 1), max(int((to + size).max()), 1) + 2
    operand, output = (random.integers(1, 99, (num_devices, r, 2)).astype(float) for r in rows)
    return [operand, output, start, size, to, received]


def tensors(given):
    return [torch.tensor(x) for x in given]


def ragged(axis_name="i", groups=None):
    return lambda *xs: ragged_all_to_all(*xs, axis_name=axis_name, axis_index_groups=groups)


def test_example_of_jax():
    given = tensors(JAX_EXAMPLE)
    assert vmap(ragged(), axis_name="i")(*given).tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [None, [[0, 2], [3, 1]]])
def test_values(seed, groups):
    for each in (1, 2, 3):
        given = random_exchange(4, each, seed, groups)
        overlapping = [*given[:4], given[4] // 2, given[5]]  # of two slices the later one wins
        for arrays in (given, overlapping):
            got = vmap(ragged(groups=groups), axis_name="i")(*tensors(arrays))
            np.testing.assert_array_equal(got.numpy(), model(arrays, groups))


def test_on_devices(mode, pool):
    given = random_exchange(4, 2, 1)
    f = tp.pmap(ragged(), axis_name="i", compile=mode)
    np.testing.assert_array_equal(f(*tensors(given)).numpy(), model(given))


@pytest.mark.parametrize("world", (ON_DEVICES | VMAPPED).values(), ids=ON_DEVICES | VMAPPED)
def test_over_every_kind_of_axes(world, pool):
    given = random_exchange(8, 1, 2)
    got = world(ragged(world.axis_name), *tensors(given))
    np.testing.assert_array_equal(got.numpy(), model(given))


def test_other_batch_dims():
    first, second = random_exchange(4, 2, 3), random_exchange(4, 2, 3)
    second[0] = second[0][:, ::-1].copy()
    second[3][:] = second[5][:] = 0
    both = [torch.stack(tensors(pair)) for pair in zip(first, second, strict=True)]
    got = torch.func.vmap(vmap(ragged(), axis_name="i"))(*both)
    for k, given in enumerate((first, second)):
        np.testing.assert_array_equal(got[k].numpy(), model(given))


@pytest.mark.parametrize("groups", [None, [[1, 3], [2, 0]]])
def test_derivatives(groups):
    """The exchange is linear in operand and output: its transpose follows from its values."""
    given = random_exchange(4, 2, 5, groups)
    slices = tensors(given[2:])
    x, y = tensors(given[:2])
    w = torch.arange(float(y.numel()), dtype=y.dtype).reshape(y.shape) + 1

    def body(x, y, w, *slices):
        def f(x, y):
            return ragged(groups=groups)(x, y, *slices)

        return *torch.func.vjp(f, x, y)[1](w), torch.func.jvp(f, (x, y), (x**2, y**2))[1]

    pulled_x, pulled_y, pushed = vmap(body, axis_name="i")(x, y, w, *slices)
    squares = [given[0] ** 2, given[1] ** 2, *given[2:]]
    np.testing.assert_array_equal(pushed.numpy(), model(squares, groups))
    for place, pulled in ((0, pulled_x), (1, pulled_y)):
        shape = given[place].shape
        wanted = []
        for unit in np.eye(pulled.numel()).reshape(-1, *shape):
            operands = [np.zeros_like(given[0]), np.zeros_like(given[1]), *given[2:]]
            operands[place] = unit
            wanted.append((model(operands, groups) * w.numpy()).sum())
        np.testing.assert_array_equal(pulled.numpy(), np.reshape(wanted, shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.float8_e5m2, torch.complex64])
def test_dtypes(dtype):
    given = tensors(JAX_EXAMPLE)
    given[:2] = [(x > 1).to(dtype) for x in given[:2]]
    given[2:] = [x.to(torch.uint8) for x in given[2:]]
    got = vmap(ragged(), axis_name="i")(*given)
    assert got.dtype == dtype
    assert got.to(torch.complex64).real.tolist() == [[0, 1, 0, 0], [1, 1, 1, 0]]


def test_nothing_to_send():
    given = tensors(JAX_EXAMPLE)
    given[0], given[3], given[5] = given[0][:, :0], given[3] * 0, given[5] * 0
    given[1] = given[1] + 7
    assert vmap(ragged(), axis_name="i")(*given).tolist() == [[7] * 4] * 2
    given[1] = given[1][:, :0]
    assert vmap(ragged(), axis_name="i")(*given).shape == (2, 0)


def test_no_axis():
    operand, output = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    one, two = torch.tensor([1]), torch.tensor([2])
    assert ragged(())(operand, output, one, two, one, two).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (2, [[0, 2], [0, 1]]),  # leaves the operand
        (2, [[-1, 1], [0, 1]]),
        (4, [[0, 0], [1, 4]]),  # leaves the output
        (5, [[1, 1], [1, 1]]),  # not what is sent
    ],
)
def test_slices_that_cannot_be(place, value):
    given = tensors(JAX_EXAMPLE)
    given[place] = torch.tensor(value)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        vmap(ragged(), axis_name="i")(*given)


@pytest.mark.parametrize(
    ("place", "value", "kind", "text"),
    [
        (2, torch.ones(2, 2), ValueError, "input_offsets must be integer type, but has dtype"),
        (3, torch.ones(2, 2) > 0, ValueError, "send_sizes must be integer type, but has dtype"),
        (4, torch.ones(2).long(), ValueError, r"output_offsets must be rank 1 .*shape \(\)"),
        (5, torch.ones(2, 0).long(), ValueError, r"recv_sizes must be rank 1 .*shape \(0,\)"),
        (5, torch.ones(2, 4).long(), ValueError, r"one length, .* lengths \[2, 2, 2, 4\]"),
        (1, torch.ones(2, 4), TypeError, r"one dtype, but got torch\.int64 and torch\.float32"),
        (1, torch.ones(2, 4, 1).long(), ValueError, r"only in the size of dim 0.*\(3,\) and"),
        (0, torch.ones(2).long(), ValueError, r"only in the size of dim 0.*\(\) and \(4,\)"),
    ],
)
def test_messages(place, value, kind, text):
    given = tensors(JAX_EXAMPLE)
    given[place] = value
    with pytest.raises(kind, match=f"ragged_all_to_all .*{text}"):
        vmap(ragged(), axis_name="i")(*given)


def test_more_messages():
    three = [torch.ones(2, 3, dtype=torch.int64)] * 4
    with pytest.raises(ValueError, match=r"a multiple of the 2 devices .* \[3, 3, 3, 3\]"):
        vmap(ragged(), axis_name="i")(*tensors(JAX_EXAMPLE[:2]), *three)
    with pytest.raises(NameError, match="unbound axis name: i"):
        ragged()(*(x[0] for x in tensors(JAX_EXAMPLE)))
    with pytest.raises(TypeError, match="takes tensors and numpy arrays, but got 3"):
        ragged(())(3, *(x[0] for x in tensors(JAX_EXAMPLE[1:])))
