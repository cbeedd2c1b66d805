"""One process of ``train_step.py``: a rank of a contender, which runs steps on request.

``python _train_step.py CONTENDER``; torch's launcher starts ``torchrun``, the two ``ddp`` and
``fsdp2`` once per rank.
It connects to the address in ``TRAIN_STEP_ADDRESS`` and then waits, without using a core, for the
name of a model or for a number of steps; it answers with the seconds, the seconds that this thread
has computed, and the loss of the last step.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import GPT, Sizes
from train_plain import Net

RANKS = 2
BATCHES = 8
"""How many different batches there are; they are used in turn."""

Batch = tuple[Tensor, Tensor]
Tensors = dict[str, Tensor]
Steps = Callable[[int], float]
"""Runs a number of steps and returns the loss of the last step for the rows of this process."""


# -- models ----------------------------------------------------------------------------------------


class Objective(nn.Module):
    """A model together with its loss, so that both are compiled as one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())


def mlp(hidden: int = 1024, rows: int = 256) -> tuple[Objective, list[Batch]]:
    """Two hidden layers; rows of 784 numbers."""
    sizes = (784, hidden, hidden, 10)
    layers: list[nn.Module] = []
    for m, n in itertools.pairwise(sizes):
        layers += [nn.Linear(m, n), nn.ReLU()]
    batches = [(torch.randn(rows, 784), torch.randint(10, (rows,))) for _ in range(BATCHES)]
    return Objective(nn.Sequential(*layers[:-1])), batches


def gpt() -> tuple[Objective, list[Batch]]:
    """The GPT of ``examples/char_gpt.py``, 0.6 million weights; 32 rows of 64 characters."""
    sizes = Sizes()
    windows = [torch.randint(96, (sizes.batch, sizes.context + 1)) for _ in range(BATCHES)]
    return Objective(GPT(96, sizes)), [(w[:, :-1], w[:, 1:]) for w in windows]


def digits() -> tuple[Objective, list[Batch]]:
    """The network of ``examples/train_plain.py``, 6,000 weights; 64 pictures of 8 x 8."""
    batches = [(torch.randn(64, 1, 8, 8), torch.randint(10, (64,))) for _ in range(BATCHES)]
    return Objective(Net(dropout=0.0)), batches  # masks differ, so losses would


MODELS = {"MLP": mlp, "large MLP": functools.partial(mlp, 2048, 512), "GPT": gpt, "digits": digits}


def make(name: str) -> tuple[Objective, Iterator[Batch]]:
    """A model and its batches, with the same numbers in every process."""
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    return model, itertools.cycle(batches)


# -- contenders ------------------------------------------------------------------------------------


def pmapped(name: str) -> Steps:
    """``torchpmap.pmap`` of the whole step, with the runtime of this process."""
    import torchpmap as tp

    if tp.process_count() == 1:
        tp.init(RANKS)
    model, batches = make(name)
    optimizer = tp.optim.functional(torch.optim.AdamW, lr=1e-3)
    params, buffers, apply = tp.functional(model, axis_name="i")
    state = tp.replicate((params, buffers, optimizer.init(params)))

    def loss_of(params: Tensors, *batch: Any) -> tuple[Tensor, Tensors]:
        return apply(params, *batch)

    @tp.pmap(axis_name="i", in_axes=(None, 0, 0), out_axes=None, donate_argnums=0)
    def step(state: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        params, buffers, kept = state
        averaged = tp.value_and_grad(loss_of, has_aux=True)
        (loss, buffers), grads = averaged(params, buffers, x, y)
        loss, grads = tp.pmean((loss, grads), "i")
        params, kept = optimizer.update(grads, kept, params)
        return (params, buffers, kept), loss

    def steps(count: int) -> float:
        nonlocal state
        for x, y in itertools.islice(batches, count):
            rows = [part.reshape(RANKS, -1, *part.shape[1:]) for part in (x, y)]
            state, loss = step(state, *tp.multihost.local_rows(rows))
        tp.block_until_ready(state)
        return loss.item()

    return steps


def replicated(name: str) -> Steps:
    """An ordinary loop over a module that ``tp.replicate`` has put on the devices."""
    import torchpmap as tp

    tp.init(RANKS)
    model, batches = make(name)
    model = tp.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def steps(count: int) -> float:
        for batch in itertools.islice(batches, count):
            loss = model(*tp.shard_batch(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return steps


def jitted(name: str, is_cut: bool = False) -> Steps:
    """The same loop, whose step ``tp.jit`` makes one program; ``is_cut``: fully sharded."""
    import torchpmap as tp

    tp.init(RANKS)
    model, batches = make(name)
    if is_cut:
        model = tp.shard_module(model, {"weight": tp.P("d")}, tp.make_mesh((RANKS,), ("d",)))
    else:
        model = tp.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @tp.jit(fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss

    def steps(count: int) -> float:
        for batch in itertools.islice(batches, count):
            loss = step(*tp.shard_batch(batch))
        tp.block_until_ready(list(model.parameters()))
        return loss.item()

    return steps


def distributed_data_parallel(name: str, is_compiled: bool = True) -> Steps:
    """``DistributedDataParallel``, with the fused AdamW."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    objective, batches = make(name)
    parallel = nn.parallel.DistributedDataParallel(objective, gradient_as_bucket_view=True)
    model = torch.compile(parallel) if is_compiled else parallel
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3, fused=True)
    return torch_steps(model, optimizer, batches)


def one_process(name: str) -> Steps:
    """``torch.compile`` of the whole model in one process, with the fused AdamW."""
    objective, batches = make(name)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3, fused=True)
    return torch_steps(torch.compile(objective), optimizer, batches)


def torch_steps(model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> Steps:
    """Steps of a rank of torch's own, with its rows of each batch."""
    ranks, rank = 1, 0
    if torch.distributed.is_initialized():
        ranks, rank = RANKS, torch.distributed.get_rank()

    def steps(count: int) -> float:
        for batch in itertools.islice(batches, count):
            x, y = (part.chunk(ranks)[rank] for part in batch)
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return steps


def fully_sharded_data_parallel(name: str) -> Steps:
    """``fully_shard`` (FSDP2) of each layer or block and of the rest, compiled, with the fused
    AdamW.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    objective, batches = make(name)
    model = objective.model
    for part in model.blocks if isinstance(model, GPT) else model.children():
        if next(part.parameters(), None) is not None:
            fully_shard(part, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3, fused=True)
    return torch_steps(torch.compile(objective), optimizer, batches)


CONTENDERS = {
    "local": pmapped,
    "torchrun": pmapped,
    "jit": jitted,
    "jit-cut": functools.partial(jitted, is_cut=True),
    "replicated": replicated,
    "ddp": distributed_data_parallel,
    "ddp-eager": functools.partial(distributed_data_parallel, is_compiled=False),
    "fsdp2": fully_sharded_data_parallel,
    "one-process": one_process,
}


# -- orders from train_step.py ---------------------------------------------------------------------


def serve(contender: str, connection: Any) -> None:
    """Follow orders: a ``str`` is a model to prepare, an ``int`` a number of steps, None ends."""
    steps: Steps | None = None
    while (order := connection.recv()) is not None:
        if isinstance(order, str):
            steps = CONTENDERS[contender](order)
            connection.send(None)
            continue
        assert steps is not None
        start, computed = time.perf_counter(), time.thread_time()
        loss = steps(order)
        connection.send((time.perf_counter() - start, time.thread_time() - computed, loss))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    host, port = os.environ["TRAIN_STEP_ADDRESS"].rsplit(":", 1)
    with Client((host, int(port))) as connection:
        serve(sys.argv[1], connection)
