"""Covers: examples/. Each is run as a program, and training also by its function."""

import ast
import doctest
import functools
import io
import math
import re
import runpy
import sys

import pytest
import torch
from _examples import EXAMPLES, run_by_python, run_by_torchrun, run_here
from _launched import run_program
from _support import DEVICE, EAGER, TEST_ALL, mostly_long
from matplotlib.figure import Figure
from test_training import EXACT, NOT_COMPILED, plain, same

import torchpmap as tp

# isort: split
import char_gpt  # these are found through _examples
import data_parallel_digits as digits
import ensembles
import mcmc_chains
import pipeline
import ppo
import ring_attention
import wave_equation

pytestmark = pytest.mark.timeout(600)  # a program runs twice in some tests


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """Matplotlib keeps the fonts open that it has once found."""
    figure = Figure()
    figure.suptitle("text and $10^2$")
    figure.savefig(io.BytesIO())


@functools.cache
def run(name: str, *arguments: str) -> str:
    """Run a program, and return what it prints.

    One that this process runs as ``__main__`` imports nothing anew, and the present fork server
    gives it its workers.
    """
    return (run_by_python if TEST_ALL else run_here)(name, *arguments)


def run_both_ways(name: str, *arguments: str) -> list[str]:
    """Run it by python, and if all is wanted by torchrun, which must print the same; the lines."""
    by_python = run(name, *arguments)
    if TEST_ALL:
        assert run_by_torchrun(name, *arguments) == by_python
    return by_python.splitlines()


matches = doctest.OutputChecker().check_output


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


QUICK = ("--devices", "2", "--quick", "--no-compile")
COOKBOOK = ("pmap_cookbook.py", "--devices", "2", "--quick")


# --- under torchrun -------------------------------------------------------------------------------


@pytest.mark.long
def test_tensor_parallel_prints_the_same_under_torchrun():
    assert run_by_torchrun("tensor_parallel.py", *QUICK) == run("tensor_parallel.py", *QUICK)


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="autocast and losses of the CPU")
@pytest.mark.parametrize("name", ["replicated", "pmap"])
def test_training_under_torchrun_has_the_losses_of_one_device(name, tmp_path):
    options = (*NOT_COMPILED[name], "--checkpoint", str(tmp_path / "train.pt"))
    arguments = ("--epochs", "1", *EXACT)
    printed = run_by_torchrun(f"train_{name}.py", *arguments, *options)
    same(printed, plain(*arguments), 5e-3)


# --- by python ------------------------------------------------------------------------------------


ON_ONE_GPU = """
import runpy, sys
import torch
torch.cuda.device_count = lambda: 1
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_hello_pmap_runs_where_there_is_one_gpu(monkeypatch):
    monkeypatch.delenv("TORCHPMAP_DEVICE_TYPE")
    hello = str(EXAMPLES / "hello_pmap.py")
    done = run_program("-c", ON_ONE_GPU, hello, "--quick", limit_s=250)
    assert "doubled lives on devices: [0, 1]" in done.stdout


FLAGS = {path.name: ("--devices", "--quick") for path in sorted(EXAMPLES.glob("*.py"))}
FLAGS["train_plain.py"] = ("--quick",)  # it is for one device


@pytest.mark.parametrize(("name", "flags"), FLAGS.items())
def test_every_example_takes_and_documents_the_same_flags(name, flags, monkeypatch, capsys):
    """And says at the top how long it usually takes; ``--help`` starts no device."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert end.value.code == 0
    accepted = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    summary, usage = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())).split("\n\n")[:2]
    assert re.search(r" \(\d+ (s|min)\)\.$", summary), summary
    line = usage.splitlines()[0].strip()
    assert line.startswith(f"python examples/{name} [")
    documented = set(re.findall(r"\[(--[a-z0-9-]+)", line))
    assert set(flags) <= documented <= accepted
    assert ("--devices" in accepted) == ("--devices" in flags)


class Asked(Exception):
    """Stops a program where it starts its devices."""


@pytest.mark.parametrize(
    "name", ["char_gpt", "ensembles", "mcmc_chains", "pmap_cookbook", "wave_equation"]
)
@pytest.mark.parametrize(("gpus", "wanted"), [(0, 2), (1, None)])
def test_examples_ask_for_every_gpu_or_two_cores(name, gpus, wanted, monkeypatch, request):
    def asked(num_devices=None):
        raise Asked(num_devices)

    request.addfinalizer(tp.shutdown)
    tp.shutdown()
    monkeypatch.delenv("TORCHPMAP_DEVICE_TYPE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(tp, "init", asked)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(Asked) as caught:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert caught.value.args == (wanted,)


@pytest.fixture
def four_devices():
    tp.init(num_devices=4)


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_digits_train_the_same_network_on_one_two_and_four_devices():
    runs = {n: digits.train(n, epochs=2, compile={"backend": "eager"}) for n in (1, 2, 4)}
    params, history, accuracy = runs[1]
    assert accuracy > 0.9
    for n in (2, 4):
        other_params, other_history, other_accuracy = runs[n]
        torch.testing.assert_close(other_params, params, atol=1e-5, rtol=1e-4)
        assert other_history.loss == pytest.approx(history.loss, rel=1e-4)
        assert other_accuracy == accuracy


@pytest.mark.long
def test_pmap_cookbook_draws_rule_30_and_prints_the_numbers_of_jax():
    lines = run_both_ways(*COOKBOOK)
    assert lines[-1] == "ok"
    assert "eight rows are on devices: [0, 1]" in lines
    # jax.random.normal(key, (200, 300)) for the keys of jax.random.split(PRNGKey(0), 8), jax 0.10.2
    means = "means: [1.5411, 1.6979, 1.5533, 1.3423, 1.4597, 1.6165, 1.4635, 1.4969]"
    assert means in lines
    start = lines.index(" " * 20 + "*" + " " * 19)
    # Wolfram's rule 30: 1, 111, 11001, 1101111, 110010001
    triangle = [line.strip().replace(" ", "0") for line in lines[start : start + 5]]
    assert triangle == ["*", "***", "**00*", "**0****", "**00*000*"]
    assert lines[start + 20] == " *  *   ***  ****     **** *** **   *   "
    assert all(len(line) == 40 for line in lines[start : start + 21])


SAME = "values and gradients are those of one device, to 1e-12"
DIGITS = ("digits_training", "digits_predictions")
# (arguments, some lines that it prints, the pictures that it writes)
COMMANDS: dict[str, tuple[tuple[str, ...], dict[int, str], tuple[str, ...]]] = {
    "hello_pmap": ((), {
        1: "doubled: [0.0, 2.0, 4.0, 6.0]",
        2: "doubled lives on devices: [0, 1]",
        6: "axis index: [0.0, 11.0, 22.0, 33.0]",
        7: "rotated: [3.0, 0.0, 1.0, 2.0]",
    }, ()),
    "compose": (() if TEST_ALL else ("--quick",), {
        2: "w = [2.0, -3.0, 0.5], b = 1.00",
        3: "16 patches on 2 devices: values from 0.0 to 1.0",
        -3: "... [80.0, 80.0, 80.0, 80.0]",
        -2: "... [0.0, 0.0, 0.0, 4.0]",
    }, ()),
    "data_parallel_digits": (("--devices", "2", "--epochs", "1", "--no-compile"),
        {0: "... after 1 epochs", -1: "wrote ..."}, DIGITS),
    "wave_equation": ((*QUICK, "--size", "40"),
        {0: "2 blocks and the whole grid agree after 60 steps"}, ("wave_equation",)),
    "ring_attention": (QUICK, {
        0: "2 devices with 32 tokens each, a sequence of 64",
        1: f"full: {SAME}",
        2: f"causal: {SAME}",
    }, ("ring_attention",)),
    "pipeline": (QUICK, {
        2: "  stage 0 | 1  2  3  4  . | .  4  3  2  1 |",
        3: "  stage 1 | .  1  2  3  4 | 4  3  2  1  . |",
        4: "bubble: 1 of 5 ticks, 20.0%",
        -2: "the gradients of all layers are those of one device, to 1e-12",
    }, ()),
    "ensembles": (QUICK, {0: "64 networks on 2 devices"}, ("ensembles",)),
    "mcmc_chains": (QUICK, {0: "16 chains on 2 devices"}, ()),
    "shard_map_matmul": (("--devices", "4", "--quick"), {
        0: "4 devices; a device keeps 4,096 bytes of each matrix",
        1: "... sends 16,384 bytes ...",  # a whole matrix of sums
        2: "... sends 12,288 bytes ...",  # its block to three neighbours in turn
        3: "... sends 8,192 bytes ...",  # its block of each matrix
    }, ()),
    "tensor_parallel": (("--devices", "4", "--quick", "--no-compile"), {
        0: "4 devices, 2 for data, 2 for model",
        2: "the gradients of all weights are those of one device, with jit and by hand",
    }, ()),
    "resize": (("--devices", "4", "--quick", "--no-compile"), {
        0: "step 5: device 1 of 4 is lost",
        1: "with pmap: the losses are those of 3 devices, ... at the end",
        2: "step 5: device 1 of 4 is lost",
        3: "with jit: the losses are those of 3 devices, ... at the end",
    }, ()),
    # 16 bytes are counters, one for each of 4 weights, which all devices have
    "fsdp": (("--devices", "4", "--quick", "--no-compile"), {
        0: "... as on one device",
        1: f"of {16 + 196_608:,} bytes ... keeps {16 + 196_608 // 4:,}",
        2: "the same by hand",
    }, ()),
}  # fmt: skip
ON_FOUR = ("shard_map_matmul", "tensor_parallel", "fsdp", "resize")
"""These need four devices (or one controller), and so are not launched as two processes."""


@pytest.mark.parametrize("name", mostly_long(COMMANDS, *ON_FOUR))
def test_a_program_checks_itself_and_writes_its_pictures(name, tmp_path):
    arguments, expected, pictures = COMMANDS[name]
    command = (f"{name}.py", *arguments, *(("--output", str(tmp_path)) if pictures else ()))
    lines = run(*command).splitlines() if name in ON_FOUR else run_both_ways(*command)
    for place, text in ({-1: "ok"} | expected).items():
        assert matches(text, lines[place], doctest.ELLIPSIS), lines
    assert all(is_picture(tmp_path / f"{picture}.png") for picture in pictures)


REFUSALS = {
    "digits": ("batch size, 70, must be divisible by 4 devices",
        lambda: digits.train(4, epochs=1, batch_size=70)),
    "wave": ("size=30 must be divisible by 4 devices", lambda: wave_equation.simulate(4, 30, 10)),
    "char_gpt": ("a batch of 8 rows does not divide over 2 devices with 3",
        lambda: char_gpt.train(PASSAGE, 2, 1, sizes=SMALL, accumulate=3)),
}  # fmt: skip


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_divide_is_refused(name):
    message, call = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("four_devices")
def test_wave_is_reflected_by_the_walls_alone_on_any_number_of_devices():
    whole = wave_equation.advance(
        wave_equation.first_wave(24), 40, wave_equation.pad_with_zeros
    ).now
    for n in (1, 2, 4):
        grids, energies = wave_equation.simulate(n, 24, 40, compile=EAGER)
        torch.testing.assert_close(grids[-1], whole, rtol=0, atol=1e-13)
        assert energies == pytest.approx([energies[0]] * 5, rel=1e-12)


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_a_device_of_the_ring_holds_no_more_when_the_sequence_grows():
    (alone, two), (alone_of_more, four) = (ring_attention.held(32, n) for n in (2, 4))
    assert alone_of_more > 2.5 * alone
    assert two <= four <= two + 1000  # the numbers of the steps


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention_is_softmax_of_all_scores(causal):
    generator = torch.Generator().manual_seed(2)
    shape = (ring_attention.HEADS, 12, ring_attention.SIZE)
    q, k, v, pulled = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    q = 40 * q  # scores of some hundreds: exp of them alone would be infinite or 0
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    gradients = torch.autograd.grad(wanted, inputs, pulled)
    found = ring_attention.ring(4, causal, EAGER)(q, k, v, pulled)
    for value, expected in zip(found, (wanted, *gradients), strict=True):
        torch.testing.assert_close(value.cpu(), expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("stages", [1, 4])
def test_pipeline_of_any_length_has_the_loss_and_gradients_of_one_device(stages):
    generator = torch.Generator().manual_seed(2)
    shape = (3, 2, pipeline.WIDTH)  # fewer microbatches than stages
    x, y = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    weights = pipeline.first_weights()
    loss = tp.value_and_grad(pipeline.pipeline(stages, EAGER), has_aux=True)
    (value, schedule), gradients = loss(weights, x, y)
    wanted, expected = tp.value_and_grad(pipeline.loss_on_one_device)(weights, x, y)
    torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.cpu(), expected[name], rtol=0, atol=1e-12)
    rows = [[0] * k + [1, 2, 3] + [0] * (stages - 1 - k) for k in range(stages)]
    assert schedule.tolist() == rows


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_ensembles_train_the_same_networks_on_one_and_four_devices():
    one, four = (ensembles.train(n, 20, compile=EAGER)[0] for n in (1, 4))
    for name, parameter in one.items():
        assert len(four[name].devices()) == 4
        torch.testing.assert_close(
            four[name].cpu().flatten(0, 1), parameter.cpu().flatten(0, 1), atol=1e-5, rtol=1e-4
        )


@pytest.mark.long
def test_mcmc_chains_are_the_same_bit_by_bit_on_one_two_and_four_devices(monkeypatch):
    # a fifth of the operations to trace in each call
    monkeypatch.setattr(mcmc_chains, "LEAPFROG_STEPS", 2)
    monkeypatch.setattr(mcmc_chains, "SAMPLES_PER_CALL", 2)
    found = {}
    for n in (1, 2, 4):
        tp.init(num_devices=n)
        samples, _, _ = mcmc_chains.run(10, compile=EAGER)
        assert len(samples[0].devices()) == n
        found[n] = torch.cat([part.cpu() for part in samples], dim=1)
    assert found[1].shape == (16, 10, 2)
    assert found[1].std() > 0.1
    for n in (2, 4):
        assert torch.equal(found[n], found[1]), n


SMALL = char_gpt.Sizes(context=16, width=16, heads=2, layers=1, batch=8)
PASSAGE = char_gpt.Text("the mapped axis of a pmap, and the axes mapped inside. " * 40)


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_char_gpt_trains_the_same_on_one_and_two_devices_in_one_pass_or_two():
    runs = [
        char_gpt.train(PASSAGE, n, 12, EAGER, sizes=SMALL, accumulate=passes)
        for n, passes in ((1, 1), (2, 1), (2, 2))
    ]
    (params, losses), *others = runs
    assert list(losses) == list(range(12))
    assert losses[11] < 0.95 * losses[0]
    for other_params, other_losses in others:
        assert other_losses == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(
            other_params["to_logits.weight"], params["to_logits.weight"], atol=1e-4, rtol=1e-3
        )


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_char_gpt_stopped_and_resumed_is_char_gpt_that_went_on(tmp_path):
    def train(steps: int, n: int = 2, **options):
        return char_gpt.train(PASSAGE, n, steps, EAGER, sizes=SMALL, **options)

    params, losses = train(6)
    saved = {"checkpoints": tmp_path, "save_every": 2}
    _, before = train(5, **saved)  # of which the last step is not saved
    resumed, after = train(6, **saved, resume=True)
    assert list(before) == [0, 1, 2, 3, 4]
    assert list(after) == [4, 5]
    assert before | after == losses
    torch.testing.assert_close(resumed, params, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_char_gpt_in_bf16_follows_float32():
    losses = {
        bf16: char_gpt.train(PASSAGE, 2, 4, EAGER, sizes=SMALL, bf16=bf16)[1]
        for bf16 in (False, True)
    }
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True] != losses[False]


@pytest.mark.long
def test_char_gpt_command_line_writes_text_and_its_picture(tmp_path):
    sizes = ("--steps", "10", "--width", "32", "--layers", "1", "--batch", "16")
    arguments = (*sizes, "--accumulate", "2", "--no-compile", "--output", str(tmp_path))
    lines = run_both_ways("char_gpt.py", *arguments)
    (losses,) = (line for line in lines if "at first" in line)
    first, last = re.search(r"loss: ([\d.]+) at first, ([\d.]+) in the end", losses).groups()
    assert float(last) < float(first)
    assert lines[-1] == "ok"
    assert is_picture(tmp_path / "char_gpt.png")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ppo_command_line_learns_and_writes_its_curve(tmp_path):
    lines = run_both_ways("ppo.py", "--devices", "2", "--quick", "--output", str(tmp_path))
    assert lines[0] == "64 environments on 2 devices, 10 updates"
    first, last = map(float, re.findall(r"[\d.]+(?= (?:at first|in the last))", lines[2]))
    assert last > 4 * first
    assert lines[-1] == "ok"
    assert is_picture(tmp_path / "ppo.png")


def test_ppo_cart_moves_as_in_gym():
    """The equations of gym's CartPole-v0, written for one cart in numbers."""
    x, v, angle, rate = state = [0.1, -0.3, 0.05, 0.4]
    for action in (1, 0, 1, 1):
        cart = torch.tensor([x, v, angle, rate, 7.0], dtype=torch.float64)
        after, ended = ppo.play(cart, torch.tensor(action), tp.random.key(0))
        force, sin, cos = (10.0 if action else -10.0), math.sin(angle), math.cos(angle)
        temp = (force + 0.05 * rate**2 * sin) / 1.1
        angular = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        linear = temp - 0.05 * angular * cos / 1.1
        state = [x + 0.02 * v, v + 0.02 * linear, angle + 0.02 * rate, rate + 0.02 * angular]
        x, v, angle, rate = state
        assert after.tolist() == pytest.approx([*state, 8.0], rel=1e-12)
        assert not ended


@pytest.mark.parametrize("end", [(2.39, 2.0, 0, 0, 3), (0, 0, -0.2, -2.0, 3), (0, 0, 0, 0, 199)])
def test_ppo_cart_starts_again_where_an_episode_ends(end):
    cart, key = torch.tensor(end, dtype=torch.float64), tp.random.key(3)
    after, ended = ppo.play(cart, torch.tensor(1), key)
    assert ended
    assert torch.equal(after, ppo.reset(key))
    assert after[:4].abs().max() <= 0.05


def test_ppo_advantages_are_sums_of_discounted_errors():
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    ended = torch.rand(6, 3, generator=generator) < 0.3
    last = torch.randn(3, generator=generator, dtype=torch.float64)
    found = ppo.advantages(ppo.Step(value, value, value, value, ended), last)
    for k in range(3):
        for start in range(6):
            wanted, weight = 0.0, 1.0
            for t in range(start, 6):
                following = last[k] if t == 5 else value[t + 1, k]
                wanted += weight * (1 + 0.99 * following * (not ended[t, k]) - value[t, k])
                if ended[t, k]:
                    break
                weight *= 0.99 * 0.95
            assert found[start, k].item() == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.long
@pytest.mark.usefixtures("four_devices")
def test_ppo_updates_on_four_devices_are_those_of_one(monkeypatch):
    for name, number in {"STEPS": 6, "EPOCHS": 2, "MINIBATCHES": 2}.items():
        monkeypatch.setattr(ppo, name, number)
    params = ppo.first_params(tp.random.key(1))
    carts = tp.vmap(ppo.reset)(tp.random.split(tp.random.key(2), 8)).unflatten(0, (4, -1))
    carts[..., 4] = 197  # episodes end, and begin again
    inputs = (params, ppo.OPTIMIZER.init(params)), carts, tp.random.split(tp.random.key(3), 4)
    axes = {"axis_name": "devices", "in_axes": (None, 0, 0), "out_axes": (None, 0, None)}
    (found, _), after, length = tp.pmap(ppo.update, **axes, compile=EAGER)(*inputs)
    (wanted, _), wanted_after, wanted_length = tp.vmap(ppo.update, **axes)(*inputs)
    assert length.item() == wanted_length.item() == 200
    torch.testing.assert_close(after.cpu(), wanted_after, rtol=0, atol=1e-10)
    for name, weight in found.items():
        torch.testing.assert_close(weight.cpu(), wanted[name], rtol=0, atol=1e-10)
        assert not torch.equal(weight.cpu(), params[name])
