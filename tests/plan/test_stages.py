"""Covers: _plan/stages.py: what a mapped call will do, before it does it."""

import pytest
import torch

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

EAGER = {"backend": "eager"}


def project(w, x):
    return tp.pmean(x["a"] @ w, "i"), tp.ppermute(x["a"][0], "i", [(0, 1)])


@pytest.fixture
def lowered():
    f = tp.pmap(project, "i", in_axes=(None, 0), out_axes=(None, 0), compile=EAGER)
    x = torch.empty(4, 5, 8, device="meta")
    return f.lower(torch.empty(8, 16, device="meta"), {"a": x})


def test_layouts_and_text(lowered):
    assert list(lowered.in_layouts) == ["w", "x['a']"]
    assert lowered.in_layouts["w"].is_replicated
    assert lowered.in_layouts["x['a']"].block_shape == (1, 5, 8)
    assert [layout.shape for layout in lowered.out_layouts] == [(5, 16), (4, 8)]
    assert "aten.mm.default" in lowered.as_text()
    assert "all_reduce" in lowered.as_text()
    assert "project" in repr(lowered)


def test_cost(lowered):
    cost = lowered.cost()
    assert cost.flops == 2 * 5 * 8 * 16
    assert cost.collectives == (("all_reduce", 5 * 16 * 4, "i"), ("ppermute", 8 * 4, "i"))
    assert cost.collective_bytes == 5 * 16 * 4 + 8 * 4
    assert cost.argument_bytes == (8 * 16 + 5 * 8) * 4
    assert cost.output_bytes == (5 * 16 + 8) * 4
    assert cost.peak_bytes >= cost.argument_bytes + 5 * 16 * 4


def test_compiled(lowered):
    compiled = lowered.compile()
    w, x = torch.rand(8, 16), torch.rand(4, 5, 8)
    mean, moved = compiled(w, {"a": x})
    torch.testing.assert_close(mean.cpu(), (x @ w).mean(0))
    torch.testing.assert_close(moved[1], x[0, 0])
    text = (
        r"argument types differ .* argument x\['a'\] compiled with float32\[4, 5, 8\] and called "
    )
    with pytest.raises(TypeError, match=text + r"with int64\[4, 5, 8\]"):
        compiled(w, {"a": x.long()})
    with pytest.raises(TypeError, match="does not match the input pytree"):
        compiled(w, [x])


def test_what_has_no_graph():
    with pytest.raises(tp.TraceError, match="runs as Python code"):
        tp.pmap(lambda x: x, compile=False).lower(torch.ones(4))
