"""Random programs for ``jit``: ordinary torch, on values that lie anywhere.

    python tests/jit/_random_jit.py 2000 7      # as many programs, from this seed
    python tests/jit/_random_jit.py 400 7 around    # under transforms of torch.func

A program is a few operations on values of 4 elements in each dim, so that no error tells when one
dim is taken for another.  Its gradients are taken inside of the function, outside of it, by a step
of an optimizer, or by transforms around it.  It runs jitted, operation by operation, and mapped
where it writes nothing that it closes over.  What is right is what torch gives in one process.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("TORCHPMAP_DEVICE_TYPE", "cpu")
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
import torch.nn.functional as F
from _support import EAGER
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

ORDER = torch.tensor([2, 0, 3, 1])
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
MATRIX = WEIGHTS * WEIGHTS.flip(0).add(0.1)[:, None] + torch.eye(4, dtype=torch.float64)


def in_place(change: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def run(x: Any, d: int) -> Any:
        y = x * 1
        change(y, d)
        return y

    return run


def detached_part(x: Any, d: int) -> Any:
    with torch.no_grad():
        scale = x.abs().amax(d, keepdim=True)
    return x / (scale + 1)


UNARY: dict[str, Callable[[Any, int], Any]] = {
    "sin": lambda x, d: x.sin(),
    "tanh": lambda x, d: x.tanh(),
    "gelu": lambda x, d: F.gelu(x),
    "square": lambda x, d: x.square() / 2,
    "scale": lambda x, d: x * -0.5 + 1,
    "swap": lambda x, d: x.transpose(d, -1),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "cumsum": lambda x, d: x.cumsum(d) / 4,
    "softmax": lambda x, d: x.softmax(d),
    "logsumexp": lambda x, d: x - x.logsumexp(d, keepdim=True),
    "sort": lambda x, d: x.sort(d).values,
    "topk": lambda x, d: x.topk(4, d).values,
    "sum": lambda x, d: x + x.sum(d, keepdim=True) / 4,
    "mean": lambda x, d: x - x.mean(),
    "std": lambda x, d: x / (x.std(d, keepdim=True) + 1),
    "amax": lambda x, d: x.amax(d, keepdim=True) - x,
    "norm": lambda x, d: x / (torch.linalg.vector_norm(x, dim=d, keepdim=True) + 1),
    "layer_norm": lambda x, d: F.layer_norm(x, x.shape[-1:]),
    "take": lambda x, d: x.index_select(d, ORDER),
    "gather": lambda x, d: x.gather(d, ORDER.view(-1, *[1] * (x.ndim - 1 - d)).expand(x.shape)),
    "index": lambda x, d: x[ORDER] if d == 0 else x[:, ORDER],
    "where": lambda x, d: torch.where(x > 0, x, x.exp() - 1),
    "halves": lambda x, d: torch.cat([x.narrow(d, 2, 2), x.narrow(d, 0, 2) * 2], d),
    "split": lambda x, d: torch.cat(x.split(1, d)[::-1], d),
    "reshape": lambda x, d: x.reshape(2, -1).tanh().reshape(x.shape),
    "flatten": lambda x, d: (x.flatten() * 2).view(x.shape),
    "linear": lambda x, d: F.linear(x, MATRIX, WEIGHTS),
    "rows": lambda x, d: (x.flatten(0, -2) @ MATRIX).relu().mul(WEIGHTS).view(x.shape),
    "tril": lambda x, d: x.tril() + 1,
    "weights": lambda x, d: x * WEIGHTS.view(-1, *[1] * (x.ndim - 1 - d)),
    "expand": lambda x, d: x.select(d, 1).unsqueeze(d).expand(x.shape) + x,
    "stop": lambda x, d: x.detach() + x / 2,
    "checkpoint": lambda x, d: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False),
    "part": detached_part,
    "add_": in_place(lambda y, d: y.add_(1)),
    "slice_": in_place(lambda y, d: y.narrow(d, 1, 2).mul_(2)),
    "transposed_": in_place(lambda y, d: y.transpose(0, d).sin_()),
    "set_": in_place(lambda y, d: y.select(d, 2).copy_(y.select(d, 0) * 3)),
}
BINARY: dict[str, Callable[[Any, Any, int], Any]] = {
    "add": lambda x, y, d: x + y,
    "mul": lambda x, y, d: x * y / 2,
    "div": lambda x, y, d: x / (y.square() + 1),
    "maximum": lambda x, y, d: torch.maximum(x, y),
    "matmul": lambda x, y, d: x @ y / 4,
    "matmul_t": lambda x, y, d: x @ y.transpose(-1, -2) / 4,
    "cat": lambda x, y, d: torch.cat([x, y], d).narrow(d, 2, 4) if x.shape == y.shape else x - y,
    "stack": lambda x, y, d: torch.stack([x, y]).mean(0) if x.shape == y.shape else x - 2 * y,
    "lerp": lambda x, y, d: torch.lerp(x, y, 0.25) if x.shape == y.shape else y - x,
    "einsum": lambda x, y, d: torch.einsum("...ij,...ik->...kj", x, y) / 4,
    "where": lambda x, y, d: torch.where(x > y, x, y * 2),
    "masked": lambda x, y, d: x.masked_fill(y > 0, 0.5),
}


def total(result: Any, other: Any) -> Any:
    return result.sin().sum() + (other * 2).sum()


def some(result: Any, other: Any, trained: Any, again: Any) -> None:
    loss = total(result, other)
    trained[0].grad = torch.autograd.grad(loss, trained[:1], allow_unused=True)[0]


def twice(result: Any, other: Any, trained: Any, again: Any) -> None:
    loss = total(result, other)
    loss.backward(retain_graph=True)
    loss.backward()


OUTSIDE: dict[str, Callable[..., Any]] = {
    "outside": lambda result, other, *_: total(result, other).backward(),
    "one of two": lambda result, other, *_: other.square().sum().backward(),
    "some": some,
    "twice": twice,
    "two calls": lambda x, y, _, again: (total(x, y) * total(*again()).cos()).backward(),
    "of arguments": lambda result, other, *_: total(result.tanh(), other).backward(),
}
"""What is differentiated outside of a call: (results, closed tensors, another call)."""
WAYS = ["forward", "inside", "step", *OUTSIDE]


def scalar(f: Any) -> Any:
    return lambda a, b: total(*f(a, b))


def pushed(f: Any, a: Any, b: Any) -> Any:
    return torch.func.jvp(f, (a, b), (b.sin() if b.shape == a.shape else a * 2, b * 3))


def second(f: Any, a: Any, b: Any) -> Any:
    inner = torch.func.grad(scalar(f))
    return torch.func.grad(lambda a, b: inner(a, b).square().sum(), (0, 1))(a, b)


AROUND: dict[str, Callable[..., Any]] = {
    "grad": lambda f, a, b: torch.func.grad(scalar(f), (0, 1))(a, b),
    "jvp": pushed,
    "vmap": lambda f, a, b: torch.func.vmap(f)(a, b),
    "second": second,
    "grad of rows": lambda f, a, b: torch.func.vmap(torch.func.grad(scalar(f)))(a, b),
    "jacrev": lambda f, a, b: torch.func.jacrev(lambda a: f(a, b)[0])(a),
}
"""Transforms around a jitted function, by the names of ways."""
SPECS = [(), (0,), (1,), (0, 1), (1, 0)]
"""Of two dims: the axes of a mesh that cut each."""


class Step(NamedTuple):
    operation: str
    operands: tuple[int, ...]
    dim: int


class RandomProgram(NamedTuple):
    shapes: list[tuple[int, ...]]
    """Of inputs: the first two are arguments, the others are closed over, and may have
    gradients.
    """
    steps: list[Step]
    way: str
    writes: bool
    layouts: list[tuple[int, Any]]
    """Of each input: 0 in this process, 1 on a line of devices, 2 on a square; and its spec."""


def made(seed: object, way: str) -> RandomProgram:
    r = random.Random(f"{seed}")
    shapes = [(4,) * r.choice([2, 2, 3]) for _ in range(r.choice([3, 4, 5]))]
    steps: list[Step] = []
    ranks = [len(shape) for shape in shapes]
    for _ in range(r.randint(2, 7)):
        a, b = (r.choice(range(len(ranks))) for _ in range(2))
        if r.random() < 0.6:
            a = len(ranks) - 1 if steps else a
        if r.random() < 0.55:
            steps.append(Step(r.choice(list(UNARY)), (a,), r.randrange(ranks[a])))
            ranks.append(ranks[a])
        else:
            rank = min(ranks[a], ranks[b])
            steps.append(Step(r.choice(list(BINARY)), (a, b), r.randrange(rank)))
            ranks.append(max(ranks[a], ranks[b]))
    layouts = [(r.choice([0, 1, 1, 2, 2]), r.choice(SPECS)) for _ in shapes]
    writes = r.random() < 0.3
    if way in AROUND:  # torch refuses checkpoints and writes there
        steps = [x._replace(operation="sin") if x.operation == "checkpoint" else x for x in steps]
    return RandomProgram(shapes, steps, way, writes and way not in AROUND, layouts)


def placed(x: torch.Tensor, layout: tuple[int, Any]) -> Any:
    kind, order = layout
    if kind == 0:
        return x
    names = ("x", "y")[:kind]
    mesh = tp.make_mesh((4,) if kind == 1 else (2, 2), names)
    entries = [None if k >= len(order) or order[k] >= kind else names[order[k]] for k in range(2)]
    return tp.device_put(x, tp.NamedSharding(mesh, tp.P(*entries)))


def in_first_row(f: Any) -> Any:
    """Mapped over two rows, of which the second has other values."""
    mapped = tp.pmap(f, compile=EAGER)

    def call(*given: Any) -> Any:
        return [y[0] for y in mapped(*[torch.stack([x, x * 2 - 1]) for x in given])]

    return call


MODES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "jitted": lambda f: tp.jit(f, compile=EAGER, fullgraph=True),
    "eager": lambda f: f,
    "mapped": in_first_row,
}


def applies(program: RandomProgram, mode: str) -> bool:
    return mode != "mapped" or not (program.writes or program.way in ("inside", "step"))


def run(program: RandomProgram, mode: str) -> list[torch.Tensor | None]:
    """All that a program gives and leaves behind, after two calls."""
    on_devices = mode in ("jitted", "eager")
    generator = torch.Generator().manual_seed(1)

    def new(k: int, *rows: int) -> Any:
        shape = (*rows, *program.shapes[k])
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        return placed(x, program.layouts[k]) if on_devices else x

    closed = [new(k) for k in range(2, len(program.shapes))]
    is_trained = program.way not in ("forward", *AROUND)
    trained = [x.requires_grad_() for x in closed[::2]] if is_trained else []
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if program.way == "step" else None
    count = new(0) * 0

    def f(a: Any, b: Any) -> Any:
        values = [a, b, *closed]
        for operation, operands, dim in program.steps:
            given = [values[k] for k in operands]
            table: Any = UNARY if len(given) == 1 else BINARY
            values.append(table[operation](*given, dim))
        result, other = values[-1], values[-2] * 1
        if program.writes:
            with torch.no_grad():
                count.add_(values[0]).mul_(0.5)
        if program.way == "inside" and result.requires_grad:
            result.sin().sum().backward()
        if optimizer is not None and result.requires_grad:
            optimizer.zero_grad()
            result.square().mean().backward()
            optimizer.step()
        return result, other

    def arguments() -> list[Any]:
        given = [new(0), new(1)]
        if program.way != "of arguments":
            return given
        trained.extend(x.requires_grad_() for x in given)
        return [x.tanh() for x in given]

    called = MODES[mode](f)
    found: list[Any] = []
    for _ in range(2):
        if program.way in AROUND:
            rows = (4,) if program.way in ("vmap", "grad of rows") else ()
            results = AROUND[program.way](called, new(0, *rows), new(1, *rows))
            found += [x.cpu().clone() for x in tree_leaves(results)]
            continue
        result, other = called(*arguments())
        used = [other] if program.way == "one of two" else [result, other]
        if program.way in OUTSIDE and any(x.requires_grad for x in used):
            OUTSIDE[program.way](result, other, trained, lambda: called(*arguments()))
        found += [result.detach().cpu().clone(), other.detach().cpu().clone()]
    left = [x.grad for x in trained]
    if program.way in OUTSIDE and mode == "jitted":
        assert all(type(x.grad) is type(x) for x in trained if x.grad is not None)
    return [None if x is None else x.detach().cpu() for x in (*found, *closed, *left, count)]


def failure(program: RandomProgram) -> str | None:
    """How a program differs in any of the modes."""
    right = run(program, "plain")
    for mode in list(MODES)[1:]:
        wrong = applies(program, mode) and difference(program, mode, right)
        if wrong:
            return f"{mode}: {wrong}"
    return None


def difference(program: RandomProgram, mode: str, right: list[torch.Tensor | None]) -> str | None:
    try:
        mine = run(program, mode)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(mine) != len(right):
        return f"{len(mine)} values instead of {len(right)}"
    for k, (a, b) in enumerate(zip(mine, right, strict=True)):
        if a is None or b is None:
            # the gradient of what a mapped call does not use is 0, as in JAX
            if a is not b and (mode != "mapped" or a is None or a.any()):
                return f"value {k} is {a}, not {b}"
            continue
        try:
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        except AssertionError as error:
            return f"value {k}: {error}"
    return None


def main(count: int, seed: str, around: str = "") -> int:
    tp.init(4)
    begin, failures = time.monotonic(), 0
    for k in range(count):
        ways = list(AROUND) if around else WAYS
        program = made(f"{seed}:{k}", ways[k % len(ways)])
        wrong = failure(program)
        if wrong is not None:
            failures += 1
            print(f"{seed}:{k} {program}\n    {wrong[:400]}", flush=True)
    print(f"{count} programs, {failures} wrong, {time.monotonic() - begin:.0f} s")
    return failures


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), *sys.argv[2:])))
