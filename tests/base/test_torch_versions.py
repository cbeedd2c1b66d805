"""Covers: _base/torch_versions.py.  Expectations are plain torch, row by row."""

import sys

import pytest
import torch
from _launched import run_program
from _support import EAGER, TRACED

import torchpmap as tp
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.torch_versions import apply_entry, autocast_dtypes

X = torch.arange(48.0).reshape(2, 3, 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float64, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_viewed_as_another_dtype(dim: int, dtype: torch.dtype) -> None:
    expected = torch.stack([row.view(dtype) for row in X.unbind(dim)])
    assert torch.equal(torch.vmap(lambda row: row.view(dtype), dim)(X), expected)
    twice = torch.vmap(torch.vmap(lambda row: row.view(dtype)))
    assert torch.equal(twice(X), X.view(dtype))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def test_apply_is_replaced_where_a_base_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if "apply" in vars(torch.autograd.Function):  # before torch 2.15
        monkeypatch.delattr(torch.autograd.Function, "apply")
    entry = apply_entry(lambda kind, args: [x + (kind is Double) for x in args])
    for _ in range(2):
        with Replaced([Replacement(*entry)]):
            assert Double.apply(torch.ones(())) == 4
        assert Double.apply(torch.ones(())) == 2
        assert "apply" not in vars(torch.autograd.Function)


def test_a_view_of_rows_shares_their_memory() -> None:
    x = torch.zeros(4, 2)
    torch.vmap(lambda row: row.view(torch.int32).add_(7))(x)
    assert x.view(torch.int32).tolist() == [[7, 7]] * 4


def test_a_row_without_dims_keeps_its_size() -> None:
    numbers = torch.tensor([1.0, -1.0])
    viewed = torch.vmap(lambda x: x.view(torch.int32))(numbers)
    assert torch.equal(viewed, numbers.view(torch.int32))
    with pytest.raises(RuntimeError, match=r"self\.dim\(\) cannot be 0 to view"):
        torch.vmap(lambda x: x.view(torch.int16))(numbers)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_in_a_mapped_function(pool: int) -> None:
    double = tp.pmap(lambda x: x.view(torch.int32) * 2, compile=EAGER)
    x = torch.randn(4, 3)  # two rows on each device
    assert torch.equal(double(x).cpu(), x.view(torch.int32) * 2)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("compile", TRACED)
def test_a_check_without_results_stays_in_the_graph(compile: object, pool: int) -> None:
    factor = tp.pmap(torch.linalg.cholesky, compile=compile)
    assert torch.equal(factor(4 * torch.eye(2).expand(2, 2, 2)).cpu()[0], 2 * torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        tp.block_until_ready(factor(-torch.eye(2).expand(2, 2, 2)))


def test_dtypes_of_register_autocast() -> None:
    @torch.library.custom_op("torchpmap_tests_local::cast", mutates_args=())
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert autocast_dtypes(cast) == {}
    cast.register_autocast("cpu", torch.bfloat16)
    assert autocast_dtypes(cast) == {"cpu": torch.bfloat16}


FIRST_JVP = """
import torch, torchpmap
torchpmap.pmap
print(torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),)))
"""


@pytest.mark.long
def test_the_first_jvp_does_not_warn() -> None:
    assert run_program("-W", "error", "-c", FIRST_JVP).stderr == ""


COMPILER_BUT_NO_GPU = """
import sys
import torch._inductor.compile_fx
from torchpmap._trace.toolchain import warm_up
assert "torch.utils.cpp_extension" not in sys.modules
torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = lambda: False
warm_up()
assert "torch.utils.cpp_extension" in sys.modules, "torch did not look for CUDA"
"""


@pytest.mark.inductor
@pytest.mark.cpu_only("it is about machines without a GPU")
def test_compiling_for_cpus_does_not_ask_for_a_gpu() -> None:
    assert run_program("-c", COMPILER_BUT_NO_GPU, CUDA_HOME=sys.prefix).stderr == ""


ORDINARY = """
import torch
import torchpmap as tp

tp.init(2)
x = torch.arange(4.0).reshape(2, 2)
doubled = tp.pmap(lambda x: x * 2 + tp.psum(x, "i"), axis_name="i")
assert doubled(x).tolist() == [[2, 6], [6, 10]]
slope = tp.pmap(lambda x: torch.func.jvp(torch.square, (x,), (x,))[1], compile=False)
assert slope(x).tolist() == [[0, 2], [8, 18]]
"""


@pytest.mark.inductor
def test_an_ordinary_program_prints_nothing_of_its_own() -> None:
    """Neither while it runs and ends, nor from its workers and the process they are forked from."""
    printed = run_program("-c", ORDINARY, TORCHPMAP_WARM="1").stderr
    slow = "torchpmap: waiting for"  # on a busy machine
    assert [line for line in printed.splitlines() if not line.startswith(slow)] == []
