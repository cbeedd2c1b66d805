"""Covers: _transforms/nans.py, debug.find_nan and the settings debug_nans and debug_infs."""

import os

import pytest
import torch

import torchpmap as tp

NAN = float("nan")


@pytest.fixture(autouse=True)
def devices():
    tp.init(num_devices=2)
    yield
    tp.config.debug_nans = tp.config.debug_infs = False


def found(fun, *args, **kwargs):
    """The lines of the error."""
    with pytest.raises(FloatingPointError) as caught:
        fun(*args, **kwargs)
    return str(caught.value).splitlines()


def finding(fun, *args, **kwargs):
    return found(tp.debug.find_nan, fun, *args, **kwargs)


def root(x):
    y = x.sqrt()  # here
    return tp.psum(y, "i")


mapped = tp.pmap(root, axis_name="i")


def test_the_operation_the_line_the_input_and_the_row():
    first, line, given, row = finding(mapped, torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    assert first.startswith("aten.sqrt.default gave NaN in 1 of 2 numbers of float32[2], and")
    assert line.startswith(f"  at {__file__}:")
    assert line.endswith("`y = x.sqrt()  # here`")
    assert given == "  input 0: float32[2], from -4 to 3"
    assert row == "  in row 1 of 2, axis 'i'"


def test_nothing_is_found():
    assert tp.debug.find_nan(mapped, torch.tensor([1.0, 4.0])) is None
    assert tp.debug.find_nan(tp.jit(torch.sqrt), torch.tensor([1.0, 4.0])) is None


def test_devices_of_a_shard_map():
    mesh = tp.make_mesh((2,), ("x",))
    f = tp.shard_map(torch.log, mesh=mesh, in_specs=tp.P("x"), out_specs=tp.P("x"))
    lines = finding(f, torch.tensor([1.0, 2.0, 3.0, -1.0]))
    assert lines[0].startswith("aten.log.default gave NaN in 1 of 2 numbers")
    assert lines[-1] == "  on the device at x=1"


@pytest.mark.parametrize("placed", [lambda x: x, lambda x: tp.shard_batch(x)])
def test_a_jitted_function(placed):
    lines = finding(tp.jit(lambda x: x.log() + 1), placed(torch.tensor([1.0, -1.0])))
    assert lines[0].startswith("aten.log.default gave NaN in 1 of 2 numbers of float32[2]")
    assert lines[2] == "  input 0: float32[2], from -1 to 1"


def loss(x):
    return (x * 0).sqrt().sum()  # forward


def backward(x):
    x = x.detach().requires_grad_()
    loss(x).mul(0).backward()
    return x.grad


def by_grad(x):
    return tp.grad(lambda x: loss(x) * 0)(x)


def by_torch(x):
    return torch.func.grad(lambda x: loss(x) * 0)(x)


@pytest.mark.parametrize("inside", [backward, by_grad, by_torch])
def test_gradients_name_the_forward_operation(inside):
    lines = finding(tp.pmap(inside), torch.ones(2, 1))
    assert lines[0].startswith("aten.div.Tensor gave NaN in 1 of 1")
    assert "in the backward pass: SqrtBackward0, of the operation at" in lines[1]
    assert lines[1].endswith("`return (x * 0).sqrt().sum()  # forward`")


def test_gradients_of_gradients_name_it_too():
    def power(x):
        return x**1.5  # forward

    def by_backward(x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(power(x), x, create_graph=True)
        return torch.autograd.grad(slope * 0, x)[0]

    for twice in by_backward, tp.grad(tp.grad(lambda x: power(x) * 0)):
        lines = finding(tp.pmap(twice), torch.tensor([0.0, 1.0]))
        assert lines[1].endswith("`return x**1.5  # forward`")
        assert lines[-1] == "  in row 0 of 2, axis None"


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_forward_mode(transform):
    # 0 has 1.5 * 0.5 * 0 ** -0.5 as second derivative, and -0.5 * 0 ** -1.5 as first of the root
    power = 1.5 if transform is torch.func.hessian else 0.5
    f = tp.pmap(transform(lambda x: (x**power).sum() * 0))  # some tangents are torch's short zeros
    assert tp.debug.find_nan(f, torch.ones(2, 2)) is None
    lines = finding(f, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    assert lines[0].startswith("aten.mul.Tensor gave NaN in 1 of")
    assert lines[-1] == "  in row 1 of 2, axis None"


def test_gradients_from_outside():
    def outside(x):
        return torch.func.grad(lambda x: tp.pmap(lambda x: loss(x) * 0)(x).sum())(x)

    assert "SqrtBackward0" in finding(outside, torch.ones(2, 1))[1]


def test_compiled_calls_are_looked_at():
    compiled = tp.pmap(lambda x: x / x, compile={"backend": "eager"}).lower(torch.ones(2)).compile()
    assert compiled(torch.zeros(2)).isnan().all()
    tp.config.debug_nans = True
    assert "aten.div.Tensor gave NaN in 1 of 1 numbers" in found(compiled, torch.zeros(2))[0]


@pytest.mark.parametrize("mapping", [tp.pmap, tp.jit])
@pytest.mark.parametrize("compile", [True, False])
def test_the_setting_in_a_backward_pass_outside(mapping, compile):
    f = mapping(lambda x: (x * w).sqrt(), compile=compile)
    w = torch.ones((), requires_grad=True)
    tp.config.debug_nans = True
    f(torch.ones(2)).sum().backward()
    assert w.grad == 1
    y = f(torch.zeros(2)).sum() * 0
    (line,) = found(y.backward)
    assert line.startswith("a gradient that <lambda> returns in backward() holds NaN in")
    assert "; those that it got hold none. Call torchpmap.debug.find_nan" in line
    both = f(torch.ones(2)).sum() * NAN
    both.backward()  # f has not made it


def test_steps_of_loops():
    def scanned(x):
        return tp.scan(lambda c, _: (c - 1, (c - 1).sqrt()), x, torch.arange(4.0))[1]

    def body(number, c):
        return c - 1 + 0 * c.sqrt()

    lines = finding(tp.pmap(scanned), torch.tensor([5.0, 2.0]))
    assert lines[2:] == [  # 2 - 1 - 2 is the first below 0
        "  in step 2 of a loop, counted from 0",
        "  input 0: float32[], from -1 to -1",
        "  in row 1 of 2, axis None",
    ]
    lines = finding(tp.pmap(lambda x: tp.fori_loop(0, 4, body, x)), torch.tensor([5.0, 1.0]))
    assert lines[2] == "  in step 2 of a loop, counted from 0"


def test_steps_of_other_loops():
    def until(x):
        def body(state):
            return state[0] - 1 + 0 * state[0].sqrt(), state[1] + 1

        return tp.while_loop(lambda state: state[1] < 5, body, (x, 0))[0]

    assert finding(tp.pmap(until), torch.tensor([9.0, 1.0]))[2] == (
        "  in step 2 of a loop, counted from 0"  # 1, 0, -1
    )

    def count(c, _):
        return c - 1, (c - 1).sqrt()

    def nested(x):
        return tp.scan(lambda c, _: tp.scan(count, c, length=3), x, length=3)[1]

    assert finding(tp.pmap(nested), torch.tensor([90.0, 5.0]))[2:4] == [
        "  in step 1 of a loop, counted from 0",  # 5 - 6 is the first below 0
        "  in step 2 of a loop in it, counted from 0",
    ]


def test_the_step_of_a_backward_pass_is_that_of_the_forward_operation():
    def loss(x):
        def halve(c, _):
            return c / 2, (c - 0.25).abs().sqrt()

        return tp.scan(halve, x, length=4)[1].sum() * 0

    def by_backward(x):
        x = x.detach().requires_grad_()
        loss(x).backward()
        return x.grad

    for inside in tp.grad(loss), by_backward:
        lines = finding(tp.pmap(inside), torch.tensor([3.0, 1.0]))
        assert "SqrtBackward0, of the operation at" in lines[1]
        assert "  in step 2 of a loop, counted from 0" in lines  # 1, 0.5, 0.25


def test_which_of_the_captured_tensors():
    good, model = torch.ones(2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with torch.no_grad():
        model[0].weight[1, 0] = NAN
    for mapped in tp.pmap(lambda x: model(x) * good), tp.jit(lambda x: model(x) * good):
        first, used, *_ = finding(mapped, torch.ones(2, 2))
        assert first == (
            "a tensor that the function closes over ('model', 0.weight) holds NaN in 1 of 4 "
            "numbers of float32[2, 2] before the call"
        )
        assert used == "first used by aten.addmm.default"


def test_what_no_operation_has_made():
    x = torch.tensor([1.0, NAN])
    assert "closes over ('x') holds NaN" in finding(tp.pmap(lambda _: x), torch.ones(2))[0]
    lines = finding(tp.pmap(lambda x: x * torch.tensor([NAN])), torch.ones(2))
    assert lines[0].startswith("NaN came from no operation that was looked at: from numbers of")
    assert lines[1] == "first used by aten.mul.Tensor"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_has_no_numbers_in_rows():
    def product(x):
        return torch.eye(2).to_sparse_csr() @ x.sqrt()

    assert tp.debug.find_nan(product, torch.ones(2)) is None
    assert finding(product, -torch.ones(2))[0].startswith("aten.sqrt.default gave NaN in 2 of 2")


def test_what_came_from_outside():
    x = torch.tensor([1.0, NAN])
    lines = finding(tp.pmap(lambda tree: tree["x"] * 2), {"x": x})
    assert (
        lines[0] == "argument tree['x'] holds NaN in 1 of 2 numbers of float32[2] before the call"
    )
    assert lines[1] == "first used by aten.mul.Tensor"
    lines = finding(tp.pmap(lambda y: y * x), torch.ones(2))
    assert lines[0] == (
        "a tensor that the function closes over ('x') holds NaN in 1 of 2 numbers of float32[2] "
        "before the call"
    )
    # a row that gets it from another one has not made it
    assert finding(tp.pmap(lambda x: tp.psum(x, "i"), "i"), x)[0].startswith("argument x holds")
    assert finding(mapped, x)[0].startswith("argument x holds")


def test_infinity_and_an_input_that_is_written():
    def f(x):
        x = x.clone()
        x.reciprocal_()
        return x

    zero = tp.pmap(f), torch.tensor([1.0, 0.0])
    assert tp.debug.find_nan(*zero) is None
    assert zero[0](zero[1]).tolist() == [1.0, float("inf")]
    tp.config.debug_infs = True
    lines = finding(*zero)
    assert lines[0].startswith("aten.reciprocal_.default gave infinity in 1 of 1")
    assert lines[2] == "  input 0: float32[], from 0 to 0"
    assert found(*zero) == lines
    assert mapped(torch.tensor([1.0, -1.0])).isnan().all()  # not sought


def test_a_python_number():
    lines = finding(tp.pmap(lambda x: x * NAN), torch.ones(2))
    assert lines[0].endswith("of float32[], which it was given as a number")


def test_an_operation_that_only_writes():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=NAN, foreach=True)
    lines = finding(optimizer.step)
    assert lines[0].startswith("aten._foreach_add_.List gave NaN in 2 of 2 numbers of float32[2]")
    assert lines[2] == "  input 0: float32[2], from 1 to 1"  # as it was before


def test_the_setting():
    bad = torch.tensor([1.0, -4.0])
    assert mapped(bad).isnan().all()
    assert mapped(torch.tensor([1.0, 4.0])).tolist() == [3.0, 3.0]
    tp.config.debug_nans = True
    assert mapped(torch.tensor([1.0, 4.0])).tolist() == [3.0, 3.0]
    assert found(mapped, bad) == finding(mapped, bad)
    with pytest.raises(FloatingPointError) as caught:
        mapped(bad)
    assert [entry.name for entry in caught.traceback] == ["test_the_setting", "root"]
    logged = tp.jit(lambda x: x.log() + 1)
    assert found(logged, bad) == finding(logged, bad)
    with tp.debug.fake_pmap():
        assert found(mapped, bad) == finding(mapped, bad)
    donated = tp.pmap(torch.sqrt, donate_argnums=0)
    assert found(donated, tp.device_put(bad, tp.devices()[:2]))[1].endswith("from -4 to -4")


def test_the_setting_draws_the_same_numbers():
    f = tp.pmap(lambda x: (x - torch.rand(())).sqrt())
    torch.manual_seed(1)
    values = f(torch.tensor([0.5, 0.5]))
    after = torch.get_rng_state()
    bad = [k for k in range(2) if values[k].isnan()]
    assert bad  # for this seed
    tp.config.debug_nans = True
    torch.manual_seed(1)
    lines = found(f, torch.tensor([0.5, 0.5]))
    assert lines[-1] == f"  in row {bad[0]} of 2, axis None"
    assert torch.equal(torch.get_rng_state(), after)


def test_the_setting_draws_the_same_numbers_in_jit():
    f = tp.jit(lambda x: (x - torch.rand(2)).sqrt())
    torch.manual_seed(3)
    values = f(torch.tensor([0.5, 0.5]))
    count = int(values.isnan().sum())
    assert count  # for this seed
    tp.config.debug_nans = True
    torch.manual_seed(3)
    first = found(f, torch.tensor([0.5, 0.5]))[0]
    assert first.startswith(f"aten.sqrt.default gave NaN in {count} of 2 numbers of float32[2]")


@pytest.mark.parametrize("inner", [tp.pmap(torch.sqrt), tp.jit(torch.sqrt)])
@pytest.mark.parametrize("compile", [True, False])
def test_a_mapped_function_in_a_jitted_one_that_writes(inner, compile):
    total = torch.zeros(())

    @tp.jit(compile=compile)
    def step(x):
        total.add_(1)
        return inner(x).sum()

    tp.config.debug_nans = True
    assert float(step(torch.tensor([1.0, 4.0]))) == 3
    lines = found(step, torch.tensor([1.0, -4.0]))
    assert lines[0].startswith("aten.sqrt.default gave NaN in 1 of")
    assert total == 2  # once for each call


def test_a_step_may_clean_what_it_is_given():
    total = torch.zeros(())

    @tp.jit
    def step(x):
        padded = torch.zeros(4)
        padded[:2] = x
        padded = padded.nan_to_num()
        total.add_(padded.sum())
        return padded

    tp.config.debug_nans = True
    assert step(torch.tensor([1.0, NAN])).tolist() == [1, 0, 0, 0]
    assert total == 1


def test_a_nan_that_the_second_run_does_not_make():
    here = os.getpid()

    def f(x):
        return {"y": x * 0 if os.getpid() == here else x.log()}

    tp.config.debug_nans = True
    (line,) = found(tp.pmap(f, compile=False), torch.tensor([1.0, -1.0]))
    assert line.startswith("the result of f['y'] holds NaN in 1 of 2 numbers of float32[2]; the")
    assert "in one process, uncompiled, makes none" in line


def test_a_training_step_stops_before_it_writes():
    model = tp.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @tp.jit
    def step(x):
        optimizer.zero_grad()
        loss = (model(x) * 0 + x).sqrt().sum()
        loss.backward()
        optimizer.step()
        return loss

    tp.config.debug_nans = True
    good, bad = torch.ones(4, 1), -torch.ones(4, 1)
    before = model.weight.tolist()
    assert float(step(tp.shard_batch(good))) == 4
    assert model.weight.tolist() == before  # the gradient is 0
    lines = found(step, tp.shard_batch(bad))
    assert lines[0].startswith("aten.sqrt.default gave NaN in 4 of 4 numbers of float32[4, 1]")
    assert model.weight.tolist() == before
    given = torch.tensor([[1.0], [NAN], [1.0], [1.0]])
    assert found(step, tp.shard_batch(given))[0].startswith("argument x holds NaN in 1 of 4")
    assert model.weight.tolist() == before
    tp.config.debug_nans = False
    assert step(tp.shard_batch(bad)).isnan()
