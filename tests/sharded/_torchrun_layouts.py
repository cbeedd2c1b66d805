"""What every rank of test_torchrun_layouts.py does, and what all must get.

Run as a script (under torchrun, with 4 ranks) this file runs all cases and writes the results down.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _launched import Raised, host, run_cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchpmap as tp
from torchpmap import P
from torchpmap._sharded import operations

GRAPH = {"backend": "eager"}
X = torch.arange(64.0).reshape(8, 8) - 20
CASES: dict[str, tuple[Callable[[], Any], Any]] = {}


def expect(value: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """All ranks get this."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[function.__name__] = (function, value)
        return function

    return add


def grid() -> tp.Mesh:
    return tp.make_mesh((2, 2), ("x", "y"))


def line() -> tp.Mesh:
    return tp.make_mesh((4,), ("i",))


def put(spec: tp.P, mesh: tp.Mesh | None = None, value: Any = X) -> Any:
    return tp.device_put(value, tp.NamedSharding(mesh or grid(), spec))


def mapped(
    function: Any, in_specs: Any, out_specs: Any, mesh: Any = None, mode: Any = GRAPH
) -> Any:
    where = {"mesh": mesh or grid(), "in_specs": in_specs, "out_specs": out_specs}
    return tp.shard_map(function, **where, compile=mode)


def whole(x: Any) -> Any:
    """The value in every process, after a look at the block of this one."""
    (shard,) = x.addressable_shards
    value = tp.multihost.all_gather(x)
    torch.testing.assert_close(shard.data, value[shard.index], rtol=0, atol=0)
    return value


@expect([True, True, ("x", "y"), [[0, 1], [2, 3]], True])
def meshes_there_and_back():
    mesh = grid()
    there = mesh.to_device_mesh()
    back = tp.Mesh.from_device_mesh(there)
    same = mesh.to_device_mesh() is there
    return [back == mesh, same, there.mesh_dim_names, there.mesh.tolist(), there.size() == 4]


@expect([True, [3.0, 3.0, 3.0, 3.0], [2, 0, 3, 1]])
def a_mesh_of_permuted_ranks():
    devices = [tp.devices()[k] for k in (2, 0, 3, 1)]
    mesh = tp.make_mesh((4,), ("i",), devices=devices)
    there = mesh.to_device_mesh()
    back = tp.Mesh.from_device_mesh(there)
    function = mapped(
        lambda x: tp.ppermute(x, "i", [(0, 3)]) + 3 * (tp.axis_index("i") < 3), P("i"), P("i"), back
    )
    return [back == mesh, host_of(function(torch.full((4,), 3.0))), there.mesh.tolist()]


def host_of(x: Any) -> Any:
    return tp.multihost.all_gather(x).tolist()


@expect([("a", "b"), ("dim_0", "dim_1"), True])
def meshes_of_torch():
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    nameless = init_device_mesh("cpu", (2, 2))
    named, plain = map(tp.Mesh.from_device_mesh, (theirs, nameless))
    mine = [d.id for d in tp.Mesh.from_device_mesh(theirs["b"]).devices.flat]
    return [named.axis_names, plain.axis_names, mine == [[0, 1], [2, 3]][tp.process_index() // 2]]


SPECS = (P("x"), P("x", "y"), P(None, ("x", "y")), P("y", "x"))


@expect([True] * len(SPECS))
def dtensors_of_layouts():
    found = []
    for spec in SPECS:
        x = put(spec)
        theirs = tp.to_dtensor(x)
        right = distribute_tensor(X, grid().to_device_mesh(), x.sharding.placements)
        alike = torch.equal(theirs.to_local(), right.to_local())
        back = tp.from_dtensor(theirs)
        shard, other = back.addressable_shards[0], x.addressable_shards[0]
        same = torch.equal(shard.data, other.data) and back.sharding.spec == x.sharding.spec
        found.append(alike and same and torch.equal(theirs.full_tensor(), X))
    return found


@expect([X * 2, True])
def a_dtensor_of_a_mesh_of_torch():
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(X, theirs, [Shard(1), Replicate()])
    ours = tp.from_dtensor(x)
    doubled = tp.to_dtensor(ours * 2)
    assert isinstance(doubled, DTensor)
    return [doubled.full_tensor(), doubled.placements == x.placements]


@expect([X @ X, X @ X, ("devices",), ("x", "y"), ("x", "y")])
def dtensors_of_whole_values_meet_others():
    blocks, whole = tp.to_dtensor(put(P("x", "y"))), put(P())
    found = [(blocks @ tp.to_dtensor(whole, grid())).full_tensor()]
    names = [tp.to_dtensor(whole).device_mesh.mesh_dim_names]
    with tp.set_mesh(grid()):
        found.append((blocks @ tp.to_dtensor(whole)).full_tensor())
        names.append(tp.to_dtensor(put(P(), line())).device_mesh.mesh_dim_names)
    with tp.set_mesh(tp.make_mesh((2,), ("i",))):  # of other devices
        names.append(tp.to_dtensor(put(P("x"))).device_mesh.mesh_dim_names)
    return found + names


@expect(Raised("ValueError", "which is not on the mesh that was given: Mesh('i': 4) on"))
def a_dtensor_of_blocks_on_another_mesh():
    tp.to_dtensor(put(P("x")), line())


@expect([True, True, True, True])
def checkpoints_of_blocks():
    path = Path(sys.argv[1]) / "checkpoint"
    tp.checkpoint.save(path, {"x": put(P("x", "y"))})
    found = []
    for mesh, spec in ((grid(), P("x", "y")), (grid(), P(("y", "x"))), (line(), P(None, "i"))):
        loaded = tp.checkpoint.load(path, {"x": put(spec, mesh, torch.zeros_like(X))})["x"]
        found.append(is_laid_out(loaded, spec, mesh))
    return [*found, torch.equal(tp.checkpoint.load(path)["x"], X)]


Z = torch.complex(torch.arange(24.0).reshape(6, 4) % 7, torch.arange(24.0).reshape(6, 4) % 5)


@expect([X.sum(0), X.mean(1), X @ X[:, :4], X.T.sin(), (X + X[0]).amax(), True])
def operations_on_blocks():
    x = put(P("x", "y"))
    results = [x.sum(0), x.mean(1), x @ X[:, :4], x.T.sin(), (x + X[0]).amax()]
    conjugating = torch.linalg.pinv(tp.replicate(Z)).to_host()
    alike = torch.allclose(conjugating, torch.linalg.pinv(Z), atol=1e-4)
    return [*(whole(result) for result in results), alike]


def rows_written(x: Any) -> list[Any]:
    first, last = x[0], x[-1]
    first.add_(1)
    x[3, 1].fill_(50)
    x[5] *= 2
    x[6][2].neg_()
    for k, row in enumerate(x):
        row.add_(k)
    last.mul_(first)
    return [x.add_(1), first, last]


@expect([rows_written(X.clone())] * 3)
def writes_to_rows():
    specs = (P("x", "y"), P(None, "x"), P(("y", "x")))
    return [list(map(whole, rows_written(put(spec)))) for spec in specs]


ALL = (
    *(P("x"), P("y"), P("x", "y"), P("y", "x"), P(None, "x")),
    *(P(("x", "y")), P(("y", "x")), P(None, ("x", "y")), P()),
)


def is_laid_out(x: Any, spec: tp.P, mesh: tp.Mesh) -> bool:
    """Whether this process has the right block."""
    (shard,) = x.addressable_shards
    here = tp.NamedSharding(mesh, spec).devices_indices_map(X.shape)[shard.device]
    return x.is_fully_replicated == (spec == P()) and torch.equal(shard.data, X[here])


@expect([])
def every_layout_to_every_other():
    turned = tp.make_mesh((2, 2), ("x", "y"), devices=[tp.devices()[k] for k in (2, 0, 3, 1)])
    meshes = [(line(), P(None, "i")), (turned, P("x", "y")), (turned, P("y"))]
    moves = [(before, after, grid()) for before in ALL for after in ALL]
    moves += [(P("y"), spec, mesh) for mesh, spec in meshes]
    return [
        f"{before} to {after} on {mesh}"
        for before, after, mesh in moves
        if not is_laid_out(put(after, mesh, put(before)), after, mesh)
    ]


@expect(Raised("RuntimeError", "the devices must be the same, and one mesh a refinement"))
def to_other_devices():
    put(P("i"), tp.make_mesh((2,), ("i",)), put(P("x")))


def moved(double: Any, spec: tp.P) -> list[Any]:
    """What a function gives, and what was reported."""
    with tp.debug.report_gathers() as gathers:
        result = double(put(spec))
    return [whole(result), [(gather.name, gather.num_bytes) for gather in gathers]]


@expect([[X * 2, [("move", 256)]], [X * 2, []]] * 2 + [[X * 2, [("move", 256)]]])
def an_argument_in_another_layout():
    doubles = [mapped(lambda x: x * 2, P("x", "y"), P("x", "y"), mode=m) for m in (GRAPH, False)]
    found = [moved(double, spec) for double in doubles for spec in (P(None, "x"), P("x", "y"))]
    rows = tp.pmap(lambda row: row * 2, "i", compile=GRAPH)
    return [*found, moved(rows, P("x", "y"))]


@expect([X + 1, X + 1])
def a_gradient_of_a_moved_argument():
    x = put(P(None, "x")).requires_grad_()
    half = mapped(lambda x: x * x / 2 + x, P("x", "y"), P("x", "y"))
    half(x).sum().backward()
    gradient = tp.grad(lambda x: half(x).sum())(put(P("y")))
    return [whole(x.grad), whole(gradient)]


@expect([(X * 3).bool(), X.bfloat16(), torch.complex(X, X)])
def moves_of_other_dtypes():
    return [
        whole(put(P("y", "x"), value=put(P("x", "y"), value=value)))
        for value in ((X * 3).bool(), X.bfloat16(), torch.complex(X, X))
    ]


@expect(2 * X)
def a_gradient_through_a_move():
    x = put(P("x", "y")).requires_grad_()
    y = put(P(None, "x"), value=x * 1)
    (y**2).sum().backward()
    assert x.grad is not None
    assert x.grad.sharding.spec == P("x", "y")
    return whole(x.grad)


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    lambda: nn.GRU(4, 3, batch_first=True),
    lambda: nn.GRU(4, 3),
    lambda: nn.LSTM(4, 3, batch_first=True),
    lambda: nn.PReLU(2),
]
CELLS: list[Callable[[], nn.Module]] = [
    lambda: nn.GRUCell(8, 3),
    lambda: nn.LSTMCell(8, 3),
    lambda: nn.RNNCell(8, 3),
]


def gradients_of_layers(place: Callable[[Any], Any], x: Any) -> list[Any]:
    found = []
    for make in (*LAYERS, *CELLS):
        torch.manual_seed(0)
        layer = place(make())
        rows = x if make in CELLS else x.view(8, 2, 4)
        y = layer(rows, rows, rows) if isinstance(layer, nn.MultiheadAttention) else layer(rows)
        y = y[0] if isinstance(y, tuple) else y
        (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum().backward()
        found += [parameter.grad for parameter in layer.parameters()]
    return found


@expect(gradients_of_layers(lambda layer: layer, X / 20))
def layers_train():
    return gradients_of_layers(tp.replicate, put(P("x")) / 20)


@expect([Raised("ValueError", "aten.normal_.default draws must be the same in all processes"), 0.0])
def numbers_drawn_for_copies_of_a_block_are_equal():
    x = put(P("x"), value=torch.zeros(4))
    torch.manual_seed(tp.process_index())
    try:
        drawn: Any = x.normal_()
    except ValueError as error:
        drawn = Raised("ValueError", str(error))
    torch.manual_seed(0)
    whole(put(P("x"), value=torch.zeros(4)).normal_())  # which looks at the block of this process
    return [drawn, float(x.sum())]


@expect(3.0)
def operations_of_one_process_drop_none_of_all():
    x = put(P("x"))[:, 0] * 2 + 1
    with mock.patch.multiple(operations, _MAX_OPERATIONS=8, _MAX_NUMBERS=8):
        for k in range(1, 20 if tp.process_index() == 0 else 2):
            tp.device_put(torch.ones(k), tp.local_devices()[0]) * k
        return float((x * 2 + 1 - 4 * put(P("x"))[:, 0]).mean())


@expect(True)
def a_value_for_the_device_of_one_process():
    shards = tp.device_put(X, tp.devices()[1]).addressable_shards
    blocks = [X] if tp.process_index() == 1 else []
    return all(torch.equal(x.data, y) for x, y in zip(shards, blocks, strict=True))


def cubes() -> Any:
    return mapped(lambda x: tp.psum(x**3, "x"), P("x", "y"), P(None, "y"))


@expect([3 * X**2, 3 * X**2, X - 0.5, True])
def gradients_of_host_tensors_are_whole_in_every_process():
    x, parameter = X.clone().requires_grad_(), X.clone().requires_grad_()
    cubes()(x).sum().backward()
    gradient = tp.grad(lambda x: cubes()(x).sum())(X)
    linear = mapped(lambda x: x * 0.5, P(("y", "x")), P(("y", "x")))
    linear(parameter).sum().backward()
    torch.optim.SGD([parameter], lr=1.0).step()
    return [x.grad, gradient, parameter.detach(), type(x.grad) is torch.Tensor]


@expect([2 * 6 * X, 4 * torch.eye(4).reshape(2, 2, 2, 2)])
def derivatives_of_second_order():
    """Forward over reverse: torch asks for meta copies where a tangent is zero."""
    tangent = torch.full_like(X, 2.0)
    _, along = torch.func.jvp(tp.grad(lambda x: (cubes()(x) * 1.0).sum()), (X,), (tangent,))
    function = mapped(lambda x: x, P("x", "y"), P("x", "y"))
    hessian = torch.func.hessian(lambda x: 2 * function(x).square().sum())(X[:2, :2])
    assert type(along) is type(hessian) is torch.Tensor  # as a gradient of a host tensor is
    return [along, hessian]


@expect(3.0)
def a_part_of_the_job_compares_its_host_values_alone():
    first = tp.process_index() // 2 * 2
    if first == 0:
        return 3.0  # two of four processes call it
    pair = tp.make_mesh((2,), ("i",), devices=tp.devices()[first : first + 2])
    total = mapped(lambda x: tp.psum(x, "i"), P("i"), P(), pair)
    return float(total(torch.tensor([1.0, 2.0])))


if __name__ == "__main__":
    tp.init()  # before a DeviceMesh: it needs the process group
    cases = {name: lambda run=CASES[name][0]: host(run()) for name in sys.argv[2:]}
    run_cases(cases, sys.argv[1])
