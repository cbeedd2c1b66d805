"""Covers: debug.record, dump and replay; _trace/recording.py, debug/_record*.py, _graph_data.py,
_lockstep.py, _replay.py, _bisect.py."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import conv1d, dropout

import torchpmap as tp
from torchpmap._base.errors import kind_of

pytestmark = pytest.mark.usefixtures("pool")

EAGER = {"backend": "eager"}
NAN = float("nan")
F8 = torch.ones(4, 2).to(torch.float8_e5m2)


def again():
    return tp.debug.replay(tp.debug.dump()[-1])


def collectives(x):
    stack = torch.stack([x, x + 1, x + 2, x + 3])
    return (
        tp.psum((x, x.double(), x.long()), "i"),
        tp.pmax(x, "i"),
        tp.pmin(x.to(torch.float16), "i"),
        tp.all_gather(x, "i"),
        tp.psum_scatter(stack, "i"),
        tp.all_to_all(stack, "i", 0, 0),
        tp.ppermute(x, "i", [(0, 2), (3, 1)]),
        tp.psum(x, "i", axis_index_groups=[[0, 3], [1, 2]]),
        x * tp.axis_index("i"),
        tp.psum(x > 0, "i"),
    )


def sums(x):
    return tp.psum((x, x.double()), "i"), tp.pmax(x, "i")


def loops(x):
    def step(carry, row):
        carry = torch.tanh(carry * row) + tp.pmean(row, "i")
        return carry, carry.sum()

    last, sums = tp.scan(step, x, torch.stack([x, x + 1, x - 1]))
    doubled = tp.while_loop(lambda y: y.abs().sum() < 50, lambda y: y * 2, x)
    return last, sums, doubled, tp.cond(x.sum() > 0, torch.exp, torch.neg, x)


def random(x):
    return dropout(x, 0.5), torch.rand(3), tp.random.normal(tp.random.key(3), (2,))


def slopes(x):
    return tp.grad(lambda x: (tp.psum(x.sin(), "i") * loops(x)[0]).sum())(x)


@pytest.mark.parametrize(
    ("fun", "rows"),
    [(collectives, 4), (sums, 8), (loops, 4), (random, 4), (random, 8), (slopes, 4), (slopes, 8)],
)
def test_the_same_bits(recording, fun, rows):
    f = tp.pmap(fun, "i", compile=EAGER)
    x = torch.linspace(-2, 3, rows * 3).reshape(rows, 3)
    leaves, tree = torch.utils._pytree.tree_flatten(f(x))
    found = again()
    assert tree.num_leaves == len(found.results)
    assert found.notes == []
    for mine, theirs in zip(found.results.values(), leaves, strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), rtol=0, atol=0, equal_nan=True)
    assert found.first_nan is None


def test_blocks_on_a_mesh_of_two_axes(recording):
    mesh = tp.make_mesh((2, 2), ("x", "y"))
    specs = {"in_specs": (tp.P("x", "y"), tp.P("y")), "out_specs": tp.P("x")}
    f = tp.shard_map(lambda a, b: tp.psum(a @ b, "y"), mesh=mesh, **specs, compile=EAGER)
    a, b = torch.randn(4, 6), torch.randn(6, 2)
    expected = f(a, b).cpu()
    (found,) = again().results.values()
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, a @ b)


def test_a_jitted_step_as_it_was_before_it_wrote(recording):
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 8, bias=False)  # the gradient of a bias is 0, but for rounding
    model = tp.replicate(torch.nn.Sequential(linear, torch.nn.BatchNorm1d(8), torch.nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters())

    @tp.jit(compile=EAGER)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = tp.shard_batch(torch.randn(16, 3))
    losses = [step(x).cpu() for _ in range(3)]
    paths = tp.debug.dump()
    found = [tp.debug.replay(path) for path in paths]  # the last two calls
    assert [next(iter(each.results.values())) for each in found] == losses[1:]
    weight = model[0].weight.detach().cpu()
    assert any(torch.equal(x, weight) for x in found[-1].results.values() if x.shape == (8, 3))
    assert found[-1].bisect(backend="inductor") is None


def test_compiled_calls_say_that_they_may_round_otherwise(recording):
    f = tp.pmap(lambda x: tp.psum(torch.sin(x) * x, "i"), "i", compile={"backend": "inductor"})
    x = torch.randn(4, 5)
    expected = f(x).cpu()
    found = again()
    torch.testing.assert_close(found.results["result"], expected)
    assert found.notes == ["it ran compiled by inductor, which may round otherwise"]


def test_a_donated_argument_is_kept_and_a_ring_is_bounded(recording):
    f = tp.pmap(lambda x: x * 2, "i", donate_argnums=0, compile=EAGER)
    x = f(torch.arange(4.0))
    for _ in range(3):
        x = f(x)
    paths = tp.debug.dump()
    assert [path.name.partition("-")[0] for path in paths] == ["00003", "00004"]
    assert [tp.debug.replay(p).results["result"].tolist() for p in paths] == [
        [0.0, 8.0, 16.0, 24.0],
        [0.0, 16.0, 32.0, 48.0],
    ]


def bad(x):
    y = (x - 1).log()  # here
    return y + tp.psum(x, "i")


def test_the_first_nan_and_where(recording):
    f = tp.pmap(bad, "i", compile=EAGER)
    f(torch.tensor([2.0, 3.0, 0.5, 4.0]))
    found = again()
    assert (found.first_nan.operation, found.first_nan.rank) == ("aten.log.default", 2)
    assert found.first_nan.line.endswith("`y = (x - 1).log()  # here`")
    assert f"first NaN: {found.first_nan}" in str(found)
    with pytest.raises(ValueError, match=r"no operation is at 'bad.py:1'.* operations are arg1_1,"):
        tp.debug.replay(tp.debug.dump()[-1], at="bad.py:1")
    f(torch.tensor([2.0, NAN, 0.5, 4.0]))
    first = again().first_nan
    assert (first.operation.partition(" ")[0], first.rank) == ("input", 1)


def test_what_was_traced_before_has_no_lines(tmp_path):
    f, x = tp.pmap(bad, "i", compile=EAGER), torch.zeros(4)
    f(x)
    with tp.debug.record(tmp_path):
        f(x)
        assert str(again().first_nan) == (
            "aten.log.default (traced before record was on: no lines), rank 0"
        )


def test_the_step_of_a_loop(recording):
    def step(carry, x):
        return carry, (carry - x).sqrt()

    tp.pmap(lambda x: tp.scan(step, x, torch.arange(5.0))[1], "i", compile=EAGER)(
        torch.tensor([9.0, 9.0, 9.0, 2.5])
    )
    assert (again().first_nan.rank, again().first_nan.steps) == (3, (3,))


# -- where features meet ---------------------------------------------------------------------------


def of_jit(x):
    return {"same": x, "twice": x * 2, "none": None, "next": [x + 1]}


@pytest.mark.parametrize(
    ("fun", "x", "dtype"),
    [
        (lambda k: tp.random.bits(k, (3,)), tp.random.split(tp.random.key(0), 4), torch.float64),
        (lambda x: tp.all_gather(x, "i"), torch.ones(4, dtype=torch.uint16), torch.float64),
        (lambda x: conv1d(x, torch.ones(2, 3, 1)), torch.rand(4, 1, 3, 5), torch.float64),
        (lambda x: x @ torch.tensor([1.0, 3.0]), torch.rand(4, 2), torch.float64),
        (lambda x: tp.ppermute(x, "i", [(0, 1)]), F8, torch.bfloat16),
    ],
)
def test_numbers_that_torch_has_few_operations_for(recording, fun, x, dtype):
    """Those of unsigned integers have no minimum; constants and factories have another dtype."""
    y = tp.pmap(fun, "i", compile=EAGER)(x).cpu()
    found = again()
    assert torch.equal(found.results["result"].float(), y.float())
    assert f"result: {kind_of(y.shape, y.dtype)} from" in str(found)
    assert found.bisect(dtype=dtype, tolerance=0.01) is None


def test_results_of_jit_have_their_names(recording):
    tp.jit(of_jit, compile=EAGER)(tp.shard_batch(torch.arange(4.0)))
    found = {name: x.tolist() for name, x in again().results.items()}
    assert found == {"result['twice']": [0, 2, 4, 6], "result['next'][0]": [1, 2, 3, 4]}


def test_whatever_the_caller_set(recording):
    y = tp.pmap(lambda x: x * tp.axis_index("i") + torch.ones(2).sum(), "i", compile=EAGER)(
        torch.arange(4.0)
    ).cpu()
    (path,) = tp.debug.dump()

    def same():
        return torch.equal(tp.debug.replay(path).results["result"], y)

    for around in (torch.device("meta"), torch.inference_mode(), tp.debug.fake_pmap()):
        with around:
            assert same()
            assert tp.debug.replay(path).bisect(dtype=torch.float64) is None
    f = tp.pmap(lambda x: x + tp.debug.replay(path).results["result"].sum(), compile=EAGER)
    assert f(torch.zeros(4)).tolist() == [22.0] * 4
    assert torch.func.grad(lambda x: x * same())(torch.tensor(1.0)) == 1


def test_memory_that_nothing_has_set_says_nothing(recording):
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        tp.pmap(lambda x: torch.empty(3, 2).t().copy_(x), compile=EAGER)(torch.ones(4, 2, 3))
        assert again().first_nan is None
    finally:
        torch.use_deterministic_algorithms(False)


# -- two runs --------------------------------------------------------------------------------------


def test_the_first_operation_that_another_dtype_changes(recording):
    def cancel(x):
        big = x + 1e8
        small = big - 1e8  # 0 in float32
        return tp.psum(small, "i")

    tp.pmap(cancel, "i", compile=EAGER)(torch.full((4,), 0.25))
    found = again()
    found = found.bisect(dtype=torch.float64)
    assert (found.operation, found.rank) == ("aten.sub.Tensor", 0)
    assert "small = big - 1e8" in found.line
    assert [float(x) for x in found.values] == [0.0, 0.25]
    assert again().bisect(backend="inductor") is None
    tp.pmap(torch.sin, compile=EAGER)(torch.linspace(0, 1, 4))  # of which bfloat16 rounds all
    assert again().bisect(dtype=torch.bfloat16) is None


def test_two_calls(recording):
    f = tp.pmap(lambda x, n: tp.psum(x.floor() * n, "i"), "i", in_axes=(0, None), compile=EAGER)
    f(torch.tensor([1.0, 2.0, 3.5, 4.0]), torch.tensor(2.0))
    f(torch.tensor([1.0, 2.0, 3.5, 4.0]), torch.tensor(2.0))
    one, same = tp.debug.dump()
    assert tp.debug.replay(one).bisect(same) is None
    f(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(2.0))
    _, other = tp.debug.dump()
    found = tp.debug.replay(same).bisect(other)
    assert found.operation.startswith("input ")
    assert (found.rank, found.distance) == (2, 0.5)
    found = tp.debug.replay(same).bisect(other, tolerance=0.2)
    assert found is None  # after floor they are equal
    tp.pmap(lambda x: x.exp(), compile=EAGER)(torch.ones(4))
    with pytest.raises(ValueError, match="run different graphs: compare two calls"):
        tp.debug.replay(same).bisect(tp.debug.dump()[-1])
    f(torch.ones(2), torch.tensor(2.0))
    with pytest.raises(ValueError, match="on the same devices, with arguments of the same shapes"):
        tp.debug.replay(same).bisect(tp.debug.dump()[-1])
    for wrong, message in (
        ({}, "bisect takes one of against, dtype and backend"),
        ({"dtype": torch.int32}, "dtype must be one of .*float64.* but got torch.int32"),
        ({"dtype": torch.float64, "tolerance": NAN}, "tolerance must be 0 or more, but got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            tp.debug.replay(same).bisect(**wrong)


# -- what goes wrong -------------------------------------------------------------------------------


def test_an_exception_leaves_the_block(tmp_path):
    f = tp.pmap(lambda x: x * 3, compile=EAGER)

    def step():
        with tp.debug.record(tmp_path):
            f(torch.arange(4.0))
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        step()
    (path,) = tmp_path.iterdir()
    assert caught.value.__notes__ == [
        f"the last call is in {tmp_path}: python -m torchpmap replay {path}"
    ]
    found = tp.debug.replay(path)
    assert found.error == "KeyError: 'mine'"
    assert "raised" not in str(found)  # no call did
    assert "written because of KeyError: 'mine'" in str(found)
    assert found.results["result"].tolist() == [0, 3, 6, 9]
    with pytest.raises(RuntimeError, match="dump: nothing is recorded"):
        tp.debug.dump()


def test_an_exception_ends_the_script_and_the_command_line_tells_of_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torchpmap as tp\n"
        "tp.init(num_devices=2)\n"
        f"tp.debug.record({str(tmp_path / 'calls')!r})\n"
        "f = tp.pmap(lambda x: x.log(), 'i', compile={'backend': 'eager'})\n"
        "f(torch.tensor([1.0, -1.0]))\n"
        "raise ValueError('the loss is NaN')\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    (path,) = (tmp_path / "calls").iterdir()
    assert f"python -m torchpmap replay {path}" in ended.stderr
    assert ended.stderr.count("ValueError: the loss is NaN") == 1
    command = [sys.executable, "-m", "torchpmap", "replay", path, "--at", "train.py:4"]
    told = subprocess.run(
        [*command, "--dtype", "float64"], input="p log, ranks\nc\n", capture_output=True, text=True
    )
    assert "train.py(4)<module>()" in told.stdout, told.stderr
    assert "([tensor([0.]), tensor([nan])], [0, 1])" in told.stdout
    assert "written because of ValueError: the loss is NaN" in told.stdout
    assert "first NaN: aten.log.default at" in told.stdout
    assert told.stdout.endswith("first difference, dtype float64: none\n")


def test_what_raises_again_and_where(tmp_path):
    f = tp.pmap(lambda x, k: x[k], "i", compile=EAGER)

    def call():
        with tp.debug.record(tmp_path):
            f(torch.ones(4, 3), torch.tensor([1, 2, 9, 0])).block_until_ready()

    with pytest.raises(IndexError):
        call()
    (path,) = tmp_path.iterdir()
    with pytest.raises(IndexError) as caught:
        tp.debug.replay(path)
    (note,) = caught.value.__notes__
    assert note.startswith("replay: raised by aten.")
    assert note.endswith('x[k], "i", compile=EAGER)`, rank 2')


def no_code(graph, inputs):
    raise RuntimeError("no_code makes none")


def test_a_call_that_does_not_compile_is_kept(tmp_path):
    torch._dynamo.register_backend(no_code, name="no_code")
    f = tp.pmap(lambda x: x * 2, compile={"backend": "no_code"})

    def call():
        with tp.debug.record(tmp_path):
            f(torch.arange(4.0))

    with pytest.raises(Exception, match="no_code"):
        call()
    (path,) = tmp_path.iterdir()
    assert tp.debug.replay(path).results["result"].tolist() == [0, 2, 4, 6]


def test_a_folder_that_is_gone_hides_no_error(tmp_path):
    def call():
        with tp.debug.record(tmp_path / "calls"):
            tp.pmap(lambda x: x * 2, compile=EAGER)(torch.arange(4.0))
            (tmp_path / "calls").rmdir()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        call()
    (note,) = caught.value.__notes__
    assert note.startswith(f"torchpmap.debug.record cannot write to {tmp_path / 'calls'}: ")


def test_a_call_that_fails_while_it_is_traced(tmp_path):
    def call():
        with tp.debug.record(tmp_path):
            tp.pmap(lambda x: x @ x, compile=EAGER)(torch.ones(4, 2, 3))

    with pytest.raises(RuntimeError, match="must have same reduction dim") as caught:
        call()
    told = "torchpmap.debug.record: this call has no graph yet to be recorded"
    assert caught.value.__notes__[-1] == told
    assert not [*tmp_path.iterdir()]


def test_what_has_no_graph_is_said(recording, tmp_path):
    with tp.debug.fake_pmap():
        tp.pmap(lambda x: x + 1)(torch.ones(4))
    with pytest.warns(UserWarning, match="ran in this process: there is no graph"):
        assert tp.debug.dump() == []
    tp.jit(lambda x: x + 1, compile=False)(tp.replicate(torch.ones(4)))
    with pytest.warns(UserWarning, match="ran operation by operation: there is no graph"):
        assert tp.debug.dump() == []
    tp.pmap(lambda x: x + 1, compile=False)(torch.ones(4))
    with pytest.warns(UserWarning, match=r"ran as Python on the devices \(compile=False\)"):
        assert tp.debug.dump() == []

    @torch.library.custom_op("replay_test::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_fake(torch.empty_like)
    tp.pmap(lambda x: cube(x), compile=EAGER)(torch.ones(4))
    with pytest.warns(UserWarning, match="is not recorded: it has the operation replay_test::cube"):
        assert tp.debug.dump() == []


@pytest.mark.cpu_only("it ends a worker by its process id")
def test_blocks_that_were_lost_with_a_device(recording):
    pid = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)(torch.ones(4)).tolist()[1]
    x, w = tp.shard_batch(torch.arange(4.0)), tp.replicate(torch.tensor(2.0))
    f = tp.pmap(lambda w, x: w * x, "i", in_axes=(None, 0), compile=EAGER)
    f(w, x).block_until_ready()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(tp.ShardLost):
        x.cpu()
    with pytest.warns(UserWarning, match="compile=False"):
        (path,) = tp.debug.dump()
    with pytest.raises(ValueError, match=r"lacks blocks that were lost. input 0 on rank 1: ShardL"):
        tp.debug.replay(path)


def test_calls_on_other_numbers_of_devices_have_other_files(recording):
    f = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
    try:
        f(torch.arange(4.0))
        tp.resize(2)
        f(torch.arange(2.0))
        paths = tp.debug.dump()
    finally:
        tp.resize(4)
    assert [path.name[:6] for path in paths] == ["00001-", "00002-"]
    assert tp.debug.replay(paths[1]).results["result"].tolist() == [1.0, 1.0]


def test_illegal_arguments(tmp_path):
    with pytest.raises(ValueError, match="last must be a number of calls, 1 or more, but got 0"):
        tp.debug.record(tmp_path, last=0)
    with pytest.raises(FileNotFoundError, match=r"replay: there is no file .*none"):
        tp.debug.replay(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        tp.debug.record(tmp_path / "file")
