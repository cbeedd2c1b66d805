"""Covers: models that others wrote, in the styles of docs/training.md: torchvision's ResNet-18 and
transformers' GPT-2 and BERT train on any number of devices as plain torch trains them on one.

Both are made from their configurations; nothing is downloaded. The numbers are doubles: several
devices add up in another order, and ten steps through batch norms and ReLUs make that rounding
larger by a factor of 1000 and more. Of doubles twelve digits are left, of float32 two.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support import DEVICE, EAGER

import torchpmap as tp

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif(DEVICE != "cpu", reason="compares with losses of the CPU"),
]

STEPS = 10


def installed(name: str) -> pytest.MarkDecorator:
    why = f"{name} is not installed (pip install -e '.[models]')"
    return pytest.mark.skipif(find_spec(name) is None, reason=why)


def imported(name: str) -> ModuleType:
    """The module, or skip: torchvision suits one version and kind of torch only."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"{name} cannot be imported with torch {torch.__version__}: {error}")


# The models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model of others and how it is trained."""

    make: Callable[[], torch.nn.Module]
    batch: tuple[torch.Tensor, ...]
    loss: Callable[..., torch.Tensor]
    """(call, *batch) -> the mean loss; ``call`` is the model, or has the same arguments."""
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, float]
    dtype: torch.dtype = torch.float64


def draw(shape: tuple[int, ...], below: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    if below is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(below, shape, generator=generator)


def resnet() -> Model:
    resnet18 = imported("torchvision").models.resnet18

    def loss(call, images, classes):
        return F.cross_entropy(call(images), classes)

    batch = draw((8, 3, 32, 32)), draw((8,), 10)
    options = {"lr": 0.01, "momentum": 0.9}
    return Model(lambda: resnet18(num_classes=10), batch, loss, torch.optim.SGD, options)


TOKENS = 8, 12


def gpt2(
    mask: torch.Tensor | None = None, layers: int = 2, dropout: float = 0.0, own_loss: bool = False
) -> Model:
    transformers = imported("transformers.models.gpt2.modeling_gpt2")
    sizes = {"n_layer": layers, "n_head": 2, "n_embd": 48, "vocab_size": 100, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropouts = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], dropout)
    config = transformers.GPT2Config(**sizes, **ends, **dropouts)

    def loss(call, tokens, mask=None):
        if own_loss:  # it rounds to float32
            return call(input_ids=tokens, labels=tokens).loss
        logits = call(input_ids=tokens, attention_mask=mask).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Model(
        lambda: transformers.GPT2LMHeadModel(config),
        (draw(TOKENS, 100),) if mask is None else (draw(TOKENS, 100), mask),
        loss,
        torch.optim.AdamW,
        {"lr": 1e-3},
        torch.float32 if own_loss else torch.float64,
    )


def padding() -> torch.Tensor:
    """[rows, tokens]: 1 where there is a token; the rows have different lengths."""
    rows, tokens = TOKENS
    return (torch.arange(tokens) < torch.arange(5, 5 + rows)[:, None]).long()


def padding_of_pairs() -> torch.Tensor:
    """The same as [rows, 1, tokens, tokens], causal, which transformers takes as it is."""
    causal = torch.ones(TOKENS[1], TOKENS[1], dtype=torch.bool).tril()
    return causal & padding().bool()[:, None, None, :]


def bert() -> Model:
    transformers = imported("transformers.models.bert.modeling_bert")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 100, "intermediate_size": 96, "max_position_embeddings": 16}
    dropouts = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    config = transformers.BertConfig(**sizes, **dropouts)

    def loss(call, tokens):
        logits = call(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return Model(
        lambda: transformers.BertForMaskedLM(config),
        (draw(TOKENS, 100),),
        loss,
        torch.optim.AdamW,
        {"lr": 1e-3},
    )


MODELS: dict[str, Callable[[], Model]] = {
    "resnet": resnet,
    "bert": bert,
    "gpt2": gpt2,
    "one layer": lambda: gpt2(layers=1),
    "padded": lambda: gpt2(mask=padding()),
    "padded pairs": lambda: gpt2(mask=padding_of_pairs()),
    "dropout": lambda: gpt2(dropout=0.2),
    "own loss": lambda: gpt2(own_loss=True),
}


# Training ----------------------------------------------------------------------------------------

Run = tuple[list[float], dict[str, torch.Tensor]]
"""The losses, and the parameters and buffers at the end."""


def made(name: str) -> tuple[Model, torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model with the same numbers every time, and its batch."""
    model = MODELS[name]()
    torch.manual_seed(0)
    module = model.make().to(model.dtype)
    batch = tuple(x.to(model.dtype) if x.is_floating_point() else x for x in model.batch)
    return model, module, batch


def train(model: Model, module: torch.nn.Module, batch: Any) -> Run:
    """An ordinary loop, the same for plain and replicated modules."""
    torch.manual_seed(1)  # of dropout
    optimizer = model.optimizer(module.parameters(), **model.options)
    losses = []
    for _ in range(STEPS):
        loss = model.loss(module, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module.state_dict()


@functools.cache
def plain(name: str) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the cores have workers
    run = train(*made(name))
    torch.set_num_threads(threads)
    return run


def replicated(name: str) -> Run:
    model, module, batch = made(name)
    with tp.debug.report_gathers() as gathers:
        run = train(model, tp.replicate(module), tp.shard_batch(batch))
    assert gathers == []
    return run


def jitted(name: str) -> Run:
    """Each step of the ordinary loop is one program."""
    model, module, batch = made(name)
    torch.manual_seed(1)
    tp.replicate(module)
    optimizer = model.optimizer(module.parameters(), **model.options)

    @tp.jit(compile=EAGER, fullgraph=True)
    def step(*batch):
        loss = model.loss(module, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = tp.shard_batch(batch)
    assert not step.lower(*batch).resharded
    losses = [step(*batch).item() for _ in range(STEPS)]
    return losses, module.state_dict()


def mapped(name: str, compiled: Any = EAGER) -> Run:
    """Loss, gradients and optimizer are one program."""
    model, module, batch = made(name)
    params, buffers, apply = tp.functional(module, axis_name="i")
    optimizer = tp.optim.functional(model.optimizer, **model.options)

    def mean_loss(params, buffers, *batch):
        written = {}

        def call(*args, **kwargs):
            output, new = apply(params, buffers, *args, **kwargs)
            written.update(new)
            return output

        return tp.pmean(model.loss(call, *batch), "i"), written

    def step(params, buffers, state, *batch):
        gradient = tp.value_and_grad(mean_loss, has_aux=True, mean_over="i")
        (loss, buffers), grads = gradient(params, buffers, *batch)
        params, state = optimizer.update(grads, state, params)
        return params, buffers, state, loss

    rows, _ = tp.shard_batch(batch, stacked=True)
    axes = (None, None, None, *(0 for _ in rows))
    run = tp.pmap(step, "i", in_axes=axes, out_axes=None, compile=compiled)
    state, losses = optimizer.init(params), []
    for _ in range(STEPS):
        params, buffers, state, loss = run(params, buffers, state, *rows)
        losses.append(loss.item())
    return losses, {**params, **buffers}


# Comparing ---------------------------------------------------------------------------------------


NOT_SAVED = {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}
"""Buffers that a state dict does not have."""


def same(run: Run, name: str) -> None:
    """The losses and the final values are those of one device."""
    (losses, state), (expected, final) = run, plain(name)
    assert expected[-1] < 0.95 * expected[0]
    assert losses == pytest.approx(expected, rel=1e-9, abs=0)
    for path, value in state.items():
        if path in NOT_SAVED:
            continue
        # the true gradient of the bias of BERT's keys is 0, and Adam divides by it
        least = 1e-12 if path.endswith(".key.bias") else 0
        tolerance = max(1e-9 * final[path].abs().max().item(), least)
        torch.testing.assert_close(value.cpu(), final[path], rtol=0, atol=tolerance)


RESNET = pytest.param("resnet", marks=installed("torchvision"))
GPT2 = pytest.param("gpt2", marks=installed("transformers"))
BERT = pytest.param("bert", marks=installed("transformers"))
needs_transformers = installed("transformers")

ON_2 = pytest.mark.parametrize("pool", [2], indirect=True)
ON_EACH = pytest.mark.parametrize("pool", [1, 2, 4], indirect=True)


@ON_EACH
@pytest.mark.parametrize("run", [replicated, jitted, mapped])
@pytest.mark.parametrize("name", [RESNET, GPT2, BERT])
def test_ten_steps_are_those_of_one_device(name, run, pool):
    same(run(name), name)


@ON_2
@needs_transformers
@pytest.mark.inductor
@pytest.mark.parametrize("compiled", [True, False], ids=["inductor", "not traced"])
def test_other_ways_to_compile(compiled, pool):
    same(mapped("one layer", compiled), "one layer")


@ON_2
@needs_transformers
@pytest.mark.parametrize(
    ("name", "run"),
    [("padded", replicated), ("padded pairs", replicated), ("padded pairs", mapped)],
)
def test_rows_with_padding(name, run, pool):
    same(run(name), "padded")


@ON_2
@needs_transformers
def test_a_mask_whose_values_are_read_is_not_traced(pool):
    with pytest.warns(UserWarning, match="running without tracing"):
        same(mapped("padded"), "padded")


@ON_2
@needs_transformers
def test_dropout_draws_the_masks_of_one_device(pool):
    same(replicated("dropout"), "dropout")


@ON_2
@needs_transformers
@pytest.mark.parametrize("run", [replicated, mapped])
def test_the_models_own_loss_in_float32(run, pool):
    # Only losses: AdamW divides gradients by their sizes, also those of the biases of keys, which
    # are 0 but for rounding.  No loss depends on these; other parameters differ by single digits.
    losses, _ = run("own loss")
    assert losses == pytest.approx(plain("own loss")[0], rel=1e-5)
