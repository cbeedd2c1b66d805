"""Train a small GPT, character by character, on the documentation in Python's library (2 min).

    python examples/char_gpt.py [--devices 2] [--quick] [--accumulate 2] [--bf16] [--no-compile]
    torchrun --nproc-per-node=2 examples/char_gpt.py
    python examples/char_gpt.py --checkpoints outputs/char_gpt --save-every 100   # then --resume

Data-parallel: every device has the whole model and a part of each batch, and ``pmean`` averages the
gradients. One step, with all its passes, the average and AdamW, is one compiled graph; parameters
and optimizer state are donated and never leave the devices. The batch of a step depends only on the
number of the step. So a run that was stopped and resumed gives the same result as one that was not,
and a checkpoint can be resumed on another number of devices.

It writes text that looks like documentation, and to ``outputs/`` a picture: the curve of the loss,
and how well it knows each character of a batch.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import torchpmap as tp
from torchpmap.multihost import local_rows

AXIS = "devices"
FILES = (
    "_pydecimal ast configparser datetime difflib doctest inspect ipaddress shutil statistics "
    "subprocess tarfile threading turtle typing zipfile"
)

optimizer = tp.optim.functional(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)


class Sizes(NamedTuple):
    """Sizes of the model, and of a batch over all devices and passes together."""

    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 3
    batch: int = 32


class State(NamedTuple):
    """What training carries from step to step, equal on all devices."""

    params: dict[str, Tensor]
    optimizer: dict[str, Any]


# -- text ------------------------------------------------------------------------------------------


def read_text() -> str:
    """Return the docstrings of some files of the standard library, in their order."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = []
    for name in FILES.split():
        path = Path(sysconfig.get_path("stdlib"), name)
        path = path.with_suffix(".py") if not path.is_dir() else path / "__init__.py"
        source = path.read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
        found += [ast.get_docstring(node) or "" for node in nodes]
    return "\n\n".join(text for text in found if text.isascii() and text)


class Text:
    """A text as numbers, one for each different character."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.numbers = self.encode(text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.alphabet.index(character) for character in text])

    def decode(self, numbers: Tensor) -> str:
        return "".join(self.alphabet[number] for number in numbers.tolist())

    def windows(self, step: int, sizes: Sizes) -> Tensor:
        """Return the batch of a step, [batch, context + 1]."""
        random = torch.Generator().manual_seed(step)
        last = len(self.numbers) - sizes.context
        starts = torch.randint(last, (sizes.batch, 1), generator=random)
        return self.numbers[starts + torch.arange(sizes.context + 1)]

    def entropy(self) -> float:
        """The loss of a model that knows how frequent each character is, and no more."""
        share = self.numbers.bincount() / len(self.numbers)
        return -(share * share.log()).sum().item()


# -- model -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to the preceding characters, then a perceptron for each character."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, position, feature]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Characters [batch, position] -> logits of the next ones [batch, position, character]."""

    def __init__(self, num_characters: int, sizes: Sizes) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.to_logits = nn.Linear(sizes.width, num_characters, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        return self.to_logits(self.norm(self.blocks(x)))


def make_model(text: Text, sizes: Sizes) -> GPT:
    torch.manual_seed(0)
    return GPT(len(text.alphabet), sizes)


# -- training --------------------------------------------------------------------------------------


def make_step(model: nn.Module, devices: list[tp.Device], bf16: bool, compile: Any) -> Any:
    """Return ``step(state, windows) -> (state, loss)``; windows [part, pass, row, context + 1]."""

    def loss_of(params: dict[str, Tensor], windows: Tensor) -> Tensor:
        with torch.autocast(tp.default_backend(), torch.bfloat16, enabled=bf16):
            logits = torch.func.functional_call(model, params, (windows[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def step(state: State, windows: Tensor) -> tuple[State, Tensor]:
        loss, grads = tp.value_and_grad(loss_of)(state.params, windows[0])
        for part in windows[1:]:  # --accumulate: one pass after the other, one average at the end
            more_loss, more = tp.value_and_grad(loss_of)(state.params, part)
            loss, grads = loss + more_loss, {name: grads[name] + more[name] for name in grads}
        loss, grads = tp.pmean((loss, grads), AXIS)
        grads = {name: grad / len(windows) for name, grad in grads.items()}
        return State(*optimizer.update(grads, state.optimizer, state.params)), loss / len(windows)

    return tp.pmap(
        step,
        axis_name=AXIS,
        in_axes=(None, 0),
        out_axes=None,
        donate_argnums=0,
        devices=devices,
        compile=compile,
    )


def train(
    text: Text,
    num_devices: int,
    num_steps: int,
    compile: Any = True,
    *,
    sizes: Sizes = Sizes(),  # noqa: B008  (a tuple: it cannot change)
    accumulate: int = 1,
    bf16: bool = False,
    checkpoints: Path | None = None,
    save_every: int = 100,
    resume: bool = False,
    progress: bool = False,
) -> tuple[dict[str, Tensor], dict[int, float]]:
    """Return the parameters, and the losses by the numbers of the steps."""
    devices = tp.devices()[:num_devices]
    parts = (num_devices, accumulate, sizes.batch // num_devices // accumulate)
    if num_devices * accumulate * parts[-1] != sizes.batch:
        raise ValueError(
            f"a batch of {sizes.batch} rows does not divide over {num_devices} devices with "
            f"{accumulate} passes each"
        )
    model = make_model(text, sizes)
    step = make_step(model, devices, bf16, compile)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = tp.replicate(State(params, optimizer.init(params)), devices)
    first = 0
    found = tp.checkpoint.latest(checkpoints) if checkpoints is not None and resume else None
    if found is not None:
        state, first = tp.checkpoint.load(found, like=(state, 0))

    losses: dict[int, Tensor] = {}
    saving: tp.checkpoint.Saving | None = None
    characters = sizes.batch * sizes.context
    bar = tqdm(
        desc=f"training on {num_devices} devices",
        total=num_steps * characters,
        initial=first * characters,
        unit="token",
        unit_scale=True,
        disable=not progress or tp.process_index() != 0 or None,  # None: shown on a terminal only
    )
    for number in range(first, num_steps):
        windows = text.windows(number, sizes).reshape(*parts, sizes.context + 1)
        state, losses[number] = step(state, local_rows(windows))
        if number % 10 == 9:  # calls return at once; reading a number waits for the devices
            bar.set_postfix(loss=f"{losses[number].item():.3f}", refresh=False)
            bar.update(10 * characters)
        if checkpoints is not None and (number + 1) % save_every == 0:
            path = checkpoints / f"step_{number + 1}"
            saving = tp.checkpoint.save(path, (state, number + 1), asynchronous=True)
    bar.close()
    if saving is not None:
        saving.wait()
    return tp.unreplicate(state.params), {k: loss.item() for k, loss in losses.items()}


# -- results ---------------------------------------------------------------------------------------


@torch.no_grad()
def write(
    params: dict[str, Tensor], text: Text, sizes: Sizes, starts: list[str], length: int
) -> list[str]:
    """Let the model continue each start, all of one length, by ``length`` characters."""
    model, random = make_model(text, sizes), torch.Generator().manual_seed(0)
    written = torch.stack([text.encode(start) for start in starts])
    for _ in range(length):
        seen = written[:, -sizes.context :]
        logits = torch.func.functional_call(model, params, (seen,))[:, -1]
        following = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=random)
        written = torch.cat([written, following], dim=1)
    return [text.decode(numbers) for numbers in written]


@torch.no_grad()
def plot(
    losses: dict[int, float],
    params: dict[str, Tensor],
    text: Text,
    sizes: Sizes,
    devices: list[tp.Device],
    path: Path,
) -> None:
    """Draw the curve of the loss, and one batch: the loss of each character, device by device."""
    per_device = min(sizes.batch, 16) // len(devices) or 1
    windows = text.windows(0, sizes).unflatten(0, (len(devices), -1))[:, :per_device].flatten(0, 1)
    logits = torch.func.functional_call(make_model(text, sizes), params, (windows[:, :-1],))
    of_each = F.cross_entropy(logits.mT, windows[:, 1:], reduction="none")

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes, below = figure.subplots(2, 1, height_ratios=(1, 1.4))
    axes.plot(losses.keys(), losses.values(), linewidth=1)
    axes.axhline(text.entropy(), color="gray", linestyle="--", label="by frequency alone")
    axes.set(xlabel="step", ylabel="loss per character (nats)", title="Training")
    axes.grid(alpha=0.3)
    axes.legend()

    image = below.imshow(of_each, cmap="Oranges", vmin=0, vmax=8, aspect="auto")
    style = {"fontsize": 8, "family": "monospace", "ha": "center", "va": "center"}
    for row, line in enumerate(windows[:, 1:]):
        for column, character in enumerate(text.decode(line).replace("\n", " ")):
            below.text(column, row, character, in_layout=False, **style)
    for border in range(1, len(devices)):
        below.axhline(border * per_device - 0.5, color="black", linewidth=2.5)
    middles = [(k + 0.5) * per_device - 0.5 for k in range(len(devices))]
    below.set_yticks(middles, [str(device) for device in devices])
    below.tick_params(axis="y", length=0)
    below.set(xticks=[], title=f"The first {per_device} rows of a batch on each device")
    figure.colorbar(image, ax=below, label="loss of a character (nats)", extend="max")
    figure.savefig(path, dpi=110)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on every device.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or two cores")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", dest="steps", action="store_const", const=20, help="20 steps")
    parser.add_argument("--batch", type=int, default=32, help="over all devices and passes")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="passes before each update")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16")
    parser.add_argument("--checkpoints", type=Path, help="folder; default: nothing is saved")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--resume", action="store_true", help="from the latest checkpoint")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the PNG")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (2 if tp.default_backend() == "cpu" else None))
    text, n = Text(read_text()), tp.device_count()
    sizes = Sizes(width=args.width, layers=args.layers, batch=args.batch)
    params, losses = train(
        text,
        n,
        args.steps,
        not args.no_compile,
        sizes=sizes,
        accumulate=args.accumulate,
        bf16=args.bf16,
        checkpoints=args.checkpoints,
        save_every=args.save_every,
        resume=args.resume,
        progress=True,
    )
    if tp.process_index() != 0:
        return  # one process reports

    weights = sum(parameter.numel() for parameter in params.values())
    print(f"{len(text.numbers)} characters of text, {weights} weights, {n} devices")
    for start in write(params, text, sizes, ["Return ", "The cla", ">>> imp"], 200):
        print(f"--- {start}")
    if losses:
        last = mean(list(losses.values())[-10:])
        print(f"--- loss: {next(iter(losses.values())):.3f} at first, {last:.3f} in the end")
        print(f"by the frequency of characters alone it would be {text.entropy():.3f}")
        args.output.mkdir(parents=True, exist_ok=True)
        plot(losses, params, text, sizes, tp.devices(), args.output / "char_gpt.png")
        print(f"wrote {args.output}/char_gpt.png")
    print("ok")


if __name__ == "__main__":
    main()
