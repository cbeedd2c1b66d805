"""Covers: arguments, axes, statics, constants, caches and errors of pmap, as JAX tests them."""

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from _ported import counting, pmap, same, sample
from _support import EAGER, in_threads

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

ONES = torch.ones(4)


# in_axes and out_axes ----------------------------------------------------------------------------


def test_many_args() -> None:
    xs = list(counting(500, 4))
    same(pmap(lambda xs: sum(xs))(xs), counting(500, 4).sum(0))


def test_partially_mapped() -> None:
    x, y = sample(4), sample(())
    f = pmap(lambda x, y: (x - tp.psum(x, "i") + y, y), "i", in_axes=(None, 0))
    result, copies = f(y, x)
    same(result, y - 4 * y + x)
    same(copies, x)
    _, stacked = pmap(lambda x, y: (x, y), "i", in_axes=(0, None))(x, y)
    same(stacked, y.expand(4))
    assert len(stacked.addressable_shards) == 4


def test_pmap_in_axes_basic() -> None:
    x, y = counting(3, 4, 2), counting(2, 3, 4)
    f = pmap(lambda x, y: x.T + y, in_axes=(1, 2))
    same(f(x, y), x.permute(1, 2, 0) + y.permute(2, 0, 1))


def test_pmap_out_axes_basic() -> None:
    x = sample(4, 3, 2)
    f = pmap(lambda x: (x, tp.psum(x, "i")), "i", out_axes=(2, None))
    stacked, total = f(x)
    same(stacked, x.permute(1, 2, 0))
    same(total, x.sum(0))


def test_pmap_dict_out_axes() -> None:
    x = sample(4, 3)
    f = pmap(lambda x: {"b": x, "a": tp.psum(x, "i")}, "i", out_axes={"a": None, "b": 1})
    got = f(x)
    same(got["a"], x.sum(0))
    same(got["b"], x.T)


def test_int_arg_with_in_axes_none() -> None:
    same(pmap(lambda x, n: x * n, in_axes=(0, None))(counting(4), 3), 3 * counting(4))


def test_constants_fallback() -> None:
    f = pmap(lambda x, y: x + y, in_axes=(0, None))
    for _ in range(2):
        same(f(counting(4), 3.0), counting(4) + 3)


def test_lower_with_flattened_args() -> None:
    """test_lower_with_flattened_args, called instead of lowered."""
    shards = ((), (counting(4), {"a": counting(4, 2)}), [])
    got = pmap(lambda tree: tree)(shards)
    assert (got[0], got[2]) == ((), [])
    same(got[1][0], counting(4))
    same(got[1][1]["a"], counting(4, 2))


# Static arguments --------------------------------------------------------------------------------


def test_pmap_static_argnums() -> None:
    mapped = pmap(lambda x, function: function(x, 5.0), static_broadcasted_argnums=1)
    same(mapped(counting(4), torch.add), counting(4) + 5)
    same(mapped(counting(4), torch.sub), counting(4) - 5)
    same(mapped(counting(4), lambda x, y: x * y), counting(4) * 5)


def test_pmap_error_on_non_hashable_static_argument() -> None:
    f = pmap(lambda x, y: x, static_broadcasted_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static arguments are not supported"):
        f(ONES, np.asarray(1))


def test_static_argnum_on_method() -> None:
    class Model:
        @tp.pmap(static_broadcasted_argnums=0, compile=EAGER)
        def mapped(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2

    same(Model().mapped(torch.ones(1)), torch.full((1,), 3.0))


# Errors ------------------------------------------------------------------------------------------


def test_mismatched_axis_sizes() -> None:
    f = pmap(lambda x, y: x + y)
    with pytest.raises(ValueError, match="pmap got inconsistent sizes for array axes to be mapped"):
        f(sample(4), sample(3))


def test_in_axes_py_tree_prefix_mismatch_error() -> None:
    x = ONES[:, None]
    f = pmap(lambda x, y: x, in_axes=((0, 0, 0), 0))
    with pytest.raises(ValueError, match=re.escape("pmap in_axes[0]")):
        f([x, x], x)
    g = pmap(lambda x, y: x, in_axes=([(0, 0), 0], 0))
    with pytest.raises(ValueError, match=re.escape("pmap in_axes[0][0]")):
        g([[x, x], x], x)


def test_in_axes_py_tree_prefix_mismatch_error_kwargs() -> None:
    f = pmap(lambda x, y: x, in_axes=((0, 0), 0))
    with pytest.raises(ValueError, match="keyword"):
        f(x=(ONES, ONES), y=ONES)


def test_out_axes_py_tree_prefix_mismatch_error() -> None:
    f = pmap(lambda x: (x, [x, x]), out_axes=(0, [0, 0, 0]))
    with pytest.raises(ValueError, match=re.escape("pmap out_axes[1]")):
        f(ONES)


def test_device_count_error() -> None:
    """testDeviceCountError: more rows than devices run; a list of devices has to match."""
    same(pmap(lambda x: x + 1)(counting(8)), counting(8) + 1)
    f = pmap(lambda x: x, devices=tp.devices())
    text = r"Got axis_size=5, num_local_devices=4"
    with pytest.raises(ValueError, match=text):
        f(torch.ones(5))


def test_bad_axis_size_error() -> None:
    f = pmap(lambda x: tp.psum(x, "i"), "i", devices=tp.devices())
    with pytest.raises(ValueError, match="must equal the number of local devices passed to pmap"):
        f(torch.ones(3))


def test_pmap_constant_error() -> None:
    """testPmapConstantError: rows beyond the devices are held by them, also of constants."""
    with pytest.warns(UserWarning, match="5 rows run on 1 of 4 devices"):
        same(pmap(lambda x: 3)(torch.ones(5)), [3] * 5)
    with pytest.raises(ValueError, match="num_local_devices=1"):
        pmap(lambda x: 3, devices=tp.devices()[-1:])(torch.ones(2))


def test_nested_pmap_constant_error() -> None:
    """testNestedPmapConstantError: any number of rows fits."""
    same(pmap(pmap(lambda x: 3))(torch.zeros(5, 2)), np.full((5, 2), 3))


def test_pmap_axis_name_error() -> None:
    text = "unbound axis name: batch"
    with pytest.raises(NameError, match=text):
        pmap(lambda x: tp.psum(x, "batch"))(ONES)
    with pytest.raises(NameError, match=text):
        pmap(lambda x: tp.psum(x, "batch"), "i")(ONES)
    with pytest.raises(NameError, match=text):
        pmap(lambda x: tp.axis_index("batch"), compile=False)(ONES)


def test_no_devices_error() -> None:
    with pytest.raises(ValueError, match="'devices' argument to pmap must be non-empty, or None"):
        pmap(lambda x: x, devices=[])(ONES)


def test_pmap_in_axes_bool_error() -> None:
    """test_pmap_in_axes_bool_error of api_test."""
    with pytest.raises(TypeError, match="must be an int, None, or"):
        pmap(lambda x: x, in_axes=(True,))


def test_pmap_empty_arguments() -> None:
    """test_pmap_empty_arguments of api_test."""
    with pytest.raises(ValueError, match="pmap requires at least one argument"):
        pmap(lambda: 3)()
    with pytest.raises(ValueError, match="pmap requires at least one argument"):
        pmap(lambda x: x)({})


# Donation ----------------------------------------------------------------------------------------


def test_pmap_donate_argnums_invalidates_input() -> None:
    """test_pmap_donate_argnums_invalidates_input of api_test."""
    move = pmap(lambda x: x + x - x, donate_argnums=0)
    x = pmap(lambda x: x)(torch.ones(4))
    y = move(x)
    assert x.is_deleted()
    same(y, torch.ones(4))


def test_pmap_nested_donate_ignored() -> None:
    """test_pmap_nested_donate_ignored of api_test."""
    inner = pmap(lambda x: x + 1, "j", donate_argnums=0)
    x = pmap(lambda x: x)(torch.ones(4, 2))
    same(pmap(lambda row: inner(row) + row, "i")(x), torch.full((4, 2), 3.0))
    assert not x.is_deleted()


# Constants, closures, caches ---------------------------------------------------------------------


def counted(f: Any, **options: Any) -> tuple[Any, list[int]]:
    traces: list[int] = []
    note = traces.append

    def g(*args: Any) -> Any:
        note(1)
        return f(*args)

    return pmap(g, **options), traces


def test_pmap_constant() -> None:
    f, traces = counted(lambda x: 3)
    for _ in range(2):
        got = f(torch.arange(4))
        same(got, [3] * 4)
        assert [shard.device for shard in got.addressable_shards] == tp.devices()
    assert len(traces) == 1


def test_pmap_constant_devices() -> None:
    devices = tp.devices()[::-1][:3]
    got = pmap(lambda x: 3, devices=devices)(torch.arange(3))
    same(got, [3] * 3)
    assert [shard.device for shard in got.addressable_shards] == devices


def test_nested_pmap_constant_devices() -> None:
    devices = tp.devices()[::-1][:2]
    got = pmap(pmap(lambda x: 3, "j"), "i", devices=devices)(torch.zeros(2, 2, 3))
    same(got, [[3, 3], [3, 3]])
    assert [shard.device for shard in got.addressable_shards] == devices


def test_store_exception() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for dtype in (torch.float32, torch.int32):
        same(pmap(f)(torch.ones(1, dtype=dtype)), torch.full((1,), 2, dtype=dtype))


def test_pmap_global_cache() -> None:
    """test_pmap_global_cache of api_test, for one mapped function."""
    f, traces = counted(lambda x, y: x + y)
    for k in range(3):
        same(f(ONES, ONES * k), ONES + k)
    assert len(traces) == 1
    f(ONES.double(), ONES)
    assert len(traces) == 2


def test_psum_with_no_axis_doesnt_leak_functions() -> None:
    class Callable:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return tp.psum(torch.ones(()), ()) + x

    f = Callable()
    there = weakref.ref(f)
    same(pmap(f)(ONES), ONES + 1)
    assert there() is not None
    del f
    gc.collect()
    assert there() is None


def test_cache_hits_across_threads() -> None:
    f, traces = counted(lambda x: x + 1)
    f(torch.zeros(4))
    for k, got in enumerate(in_threads(6, lambda k: f(torch.full((4,), float(k))))):
        same(got, torch.full((4,), k + 1.0))
    assert len(traces) == 1


def test_wrapped() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    assert pmap(f).__wrapped__ is f


# devices= ----------------------------------------------------------------------------------------


def test_all_devices() -> None:
    x = sample(4, 3)
    f = pmap(lambda x: x - tp.psum(x, "i"), "i", devices=tp.devices())
    same(f(x), x - x.sum(0))


def test_one_device() -> None:
    x = sample(1, 2)
    functions = [pmap(lambda x: x.sin() + 1, devices=[tp.devices()[k]]) for k in (0, -1)]
    first, last = (f(x) for f in functions)
    same(first, x.sin() + 1)
    same(last, first)
    assert (first.devices(), last.devices()) == ({tp.devices()[0]}, {tp.devices()[-1]})


def nested_sums(dtype: torch.dtype, **inner: Any) -> Any:
    devices = [tp.devices()[k] for k in (2, 0)]

    def f(x: torch.Tensor) -> Any:
        return tp.psum(x.int(), "i"), tp.psum(x.int(), "j"), x.to(dtype)

    return pmap(pmap(f, "j", **inner), "i", devices=devices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_nested_pmaps(dtype: torch.dtype) -> None:
    """Also testNestedPmapsBools."""
    x = (counting(2, 3) % 2).to(dtype)
    over_i, over_j, copy = nested_sums(dtype)(x)
    same(over_i, x.int().sum(0).int().expand(2, 3))
    same(over_j, x.int().sum(1, keepdim=True).int().expand(2, 3))
    same(copy, x)


def test_nested_pmaps_error() -> None:
    with pytest.raises(ValueError, match="devices"):
        nested_sums(torch.float32, devices=tp.devices()[:3])(counting(2, 3))


def test_replicate_backend() -> None:
    x = counting(2, 2)
    f = pmap(pmap(lambda x: tp.psum(x, ("i", "j")), "j", backend="cpu"), "i", backend="cpu")
    same(f(x), torch.full((2, 2), 6.0))
