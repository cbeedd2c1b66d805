"""Train a convolutional network on handwritten digits, data-parallel over all devices (1 min).

    python examples/data_parallel_digits.py [--devices 4] [--quick] [--epochs 15] [--no-compile]
    torchrun --nproc-per-node=2 examples/data_parallel_digits.py

The parameters and the momentum are copied to the devices once and stay there: each call of the
mapped step takes the state that the previous call left on the devices, and one batch cut into equal
parts. ``pmean`` averages the gradients, so one, two or four devices train the same network. The
devices may be workers of one program, or processes of torchrun that take their part of a batch.
Two pictures are written to ``outputs/``: the learning curves, and each device's unseen digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import trange

import torchpmap as tp
from torchpmap.multihost import local_rows

AXIS = "devices"
TEST_SIZE = 360


class State(NamedTuple):
    """What training carries from step to step, equal on all devices."""

    params: dict[str, Tensor]
    momentum: dict[str, Tensor]


class History(NamedTuple):
    """One entry per epoch: training loss, training accuracy, test accuracy."""

    loss: list[float]
    train_accuracy: list[float]
    test_accuracy: list[float]


class Digits(NamedTuple):
    """The 1,797 scanned 8x8 digits of scikit-learn, shuffled and split."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_data() -> Digits:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order].unsqueeze(1)  # [1797, 1, 8, 8]
    labels = torch.from_numpy(digits.target).long()[order]
    images = (images - images[TEST_SIZE:].mean()) / images[TEST_SIZE:].std()
    return Digits(images[TEST_SIZE:], labels[TEST_SIZE:], images[:TEST_SIZE], labels[:TEST_SIZE])


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_step(model: nn.Module, learning_rate: float, compile: Any) -> Any:
    """Return ``step(state, images, labels) -> (state, loss, accuracy)`` on all devices."""

    def loss_fn(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.func.functional_call(model, params, (images,))
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return F.cross_entropy(logits, labels), accuracy

    def step(state: State, images: Tensor, labels: Tensor) -> tuple[State, Tensor, Tensor]:
        local = tp.value_and_grad(loss_fn, has_aux=True)(state.params, images, labels)
        (loss, accuracy), grads = tp.pmean(local, AXIS)
        momentum = {k: 0.9 * state.momentum[k] + grads[k] for k in grads}
        params = {k: p - learning_rate * momentum[k] for k, p in state.params.items()}
        return State(params, momentum), loss, accuracy

    # Everything is averaged, so all results are equal on all devices: out_axes=None.
    return tp.pmap(step, axis_name=AXIS, in_axes=(None, 0, 0), out_axes=None, compile=compile)


def make_evaluate(model: nn.Module, compile: Any) -> Any:
    """Return ``count(params, images, labels) -> correct``, summed over the devices."""

    def count_correct(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (images,))
        return tp.psum((logits.argmax(-1) == labels).sum(), AXIS)

    return tp.pmap(
        count_correct, axis_name=AXIS, in_axes=(None, 0, 0), out_axes=None, compile=compile
    )


def split(x: Tensor, num_devices: int) -> Tensor:
    """Cut the first dim into one part per device; return the parts of this process."""
    return local_rows(x.reshape(num_devices, -1, *x.shape[1:]))


def pad(x: Tensor, multiple: int, value: int) -> Tensor:
    """Lengthen the first dim to a multiple of the device count."""
    missing = -len(x) % multiple
    return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])


def train(
    num_devices: int | None = None,
    epochs: int = 15,
    compile: Any = True,
    *,
    batch_size: int = 72,
    learning_rate: float = 0.03,
    seed: int = 0,
    progress: bool = False,
) -> tuple[dict[str, Tensor], History, float]:
    """Train on the first ``num_devices`` devices; return parameters, history and test accuracy."""
    devices = tp.devices()[:num_devices]
    n = len(devices)
    if batch_size % n:
        raise ValueError(f"the batch size, {batch_size}, must be divisible by {n} devices")

    data, model = load_data(), make_model(seed)
    step = make_step(model, learning_rate, compile)
    evaluate = make_evaluate(model, compile)
    params = {name: p.detach() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    state = tp.replicate(State(params, momentum), devices)
    test_images = split(pad(data.test_images, n, 0), n)
    test_labels = split(pad(data.test_labels, n, -1), n)  # -1 is never predicted

    history = History([], [], [])
    order = torch.Generator().manual_seed(seed)
    hidden = not progress or tp.process_index() != 0 or None  # None: shown on a terminal only
    bar = trange(epochs, desc=f"training on {n} devices", unit="epoch", disable=hidden)
    for _ in bar:
        losses, accuracies = [], []
        shuffled = torch.randperm(len(data.train_images), generator=order)
        for batch in shuffled.split(batch_size)[: len(shuffled) // batch_size]:
            images, labels = data.train_images[batch], data.train_labels[batch]
            state, loss, accuracy = step(state, split(images, n), split(labels, n))
            losses.append(loss)
            accuracies.append(accuracy)
        # The calls above return at once; reading the numbers waits for the devices.
        history.loss.append(mean_over_steps(losses))
        history.train_accuracy.append(mean_over_steps(accuracies))
        correct = evaluate(state.params, test_images, test_labels).item()
        history.test_accuracy.append(correct / TEST_SIZE)
        bar.set_postfix(
            loss=f"{history.loss[-1]:.4f}", test_accuracy=f"{history.test_accuracy[-1]:.2%}"
        )

    return tp.unreplicate(state.params), history, history.test_accuracy[-1]


def mean_over_steps(values: list[Tensor]) -> float:
    return float(sum(value.item() for value in values) / len(values))


def plot_history(history: History, title: str, path: Path) -> None:
    figure = Figure(figsize=(8, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(history.loss) + 1)
    left.semilogy(epochs, history.loss, marker=".")
    left.set(xlabel="epoch", ylabel="training loss (cross-entropy)")
    right.plot(epochs, history.train_accuracy, marker=".", label="training")
    right.plot(epochs, history.test_accuracy, marker=".", label="test")
    right.set(xlabel="epoch", ylabel="accuracy")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def plot_predictions(params: dict[str, Tensor], devices: list[tp.Device], path: Path) -> None:
    """Draw unseen digits of each device with the network's answers; wrong ones first, in red."""
    data = load_data()
    with torch.no_grad():
        logits = torch.func.functional_call(make_model(0), params, (data.test_images,))
    answers = logits.argmax(-1)
    correct = answers == data.test_labels
    rows, part = max(1, 4 // len(devices)), -(-TEST_SIZE // len(devices))
    figure = Figure(figsize=(8, (1.3 * rows + 0.4) * len(devices)), layout="constrained")
    blocks = figure.subfigures(len(devices), 1, squeeze=False).flat
    for k, (device, block) in enumerate(zip(devices, blocks, strict=True)):
        mine = torch.arange(TEST_SIZE)[k * part : (k + 1) * part]
        mine = mine[torch.argsort(correct[mine].int(), stable=True)]
        block.set(facecolor=("#dbeafe", "#ffedd5")[k % 2], edgecolor="black", linewidth=1)
        block.suptitle(
            f"{device}: {len(mine)} unseen digits, {(~correct[mine]).sum()} read wrongly"
        )
        for axes in (grid := block.subplots(rows, 8, squeeze=False)).flat:
            axes.axis("off")
        for axes, i in zip(grid.flat, mine.tolist(), strict=False):
            title = f"{answers[i]}" if correct[i] else f"{answers[i]} (is {data.test_labels[i]})"
            axes.imshow(data.test_images[i, 0], cmap="gray_r")
            axes.set_title(title, color="black" if correct[i] else "red", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier on every device.")
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--quick", dest="epochs", action="store_const", const=2, help="two epochs")
    parser.add_argument("--batch-size", type=int, default=72, help="over all devices together")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the PNGs")
    args = parser.parse_args()

    if args.devices is not None:
        tp.init(num_devices=args.devices)
    params, history, accuracy = train(
        args.devices,
        args.epochs,
        not args.no_compile,
        batch_size=args.batch_size,
        seed=args.seed,
        progress=True,
    )
    if tp.process_index() != 0:
        return  # one process reports

    args.output.mkdir(parents=True, exist_ok=True)
    devices, size = tp.devices()[: args.devices], args.batch_size
    title = f"{size} digits in a step, {size // len(devices)} on each of {len(devices)} devices"
    plot_history(history, title, args.output / "digits_training.png")
    plot_predictions(params, devices, args.output / "digits_predictions.png")
    print(f"test accuracy {accuracy:.2%} after {args.epochs} epochs")
    print(f"wrote {args.output}/digits_training.png and {args.output}/digits_predictions.png")


if __name__ == "__main__":
    main()
