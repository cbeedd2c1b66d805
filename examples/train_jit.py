"""Train a small network on handwritten digits on all devices, each step as one program (60 s).

    python examples/train_jit.py [--devices 4] [--quick] [--epochs 4] [--no-amp] [--no-compile]
    torchrun --nproc-per-node=2 examples/train_jit.py

This is ``train_plain.py`` with 27 changed lines: the model is replicated, each batch is cut over
the devices, and the step, a function of the batch, is compiled as one program for all devices. The
losses are those of one device. docs/training.md explains each line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchpmap as tp


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(32 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.linear(self.dropout(x.flatten(1)))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(digits.target)[order]
    return TensorDataset(images[:1395], labels[:1395]), TensorDataset(images[1395:], labels[1395:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--quick", dest="epochs", action="store_const", const=1, help="one epoch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better loss")
    parser.add_argument("--no-amp", action="store_true", help="float32 instead of bfloat16")
    parser.add_argument("--checkpoint", type=Path, default=Path("outputs/train.pt"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="run the program uncompiled")
    args = parser.parse_args()

    tp.init(num_devices=args.devices)
    torch.manual_seed(0)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = tp.replicate(Net(args.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    first, best, bad = 0, float("inf"), 0
    if args.resume:
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        tp.replicate(optimizer)
        schedule.load_state_dict(state["schedule"])
        first, best, bad = state["epoch"], state["best"], state["bad"]

    @tp.jit(compile={"backend": "eager"} if args.no_compile else True)
    def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not args.no_amp):
            loss = F.cross_entropy(model(x), y)
        (loss / args.accumulate).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # after a resume, too
        model.train()
        batches = tqdm(train_loader, f"epoch {epoch}", leave=False, disable=None)  # on a terminal
        for i, (x, y) in enumerate(batches):
            x, y = tp.shard_batch((x, y))
            is_last = (i + 1) % args.accumulate == 0 or i + 1 == len(train_loader)
            loss = step(x, y, is_last)
            if i % 10 == 0 and tp.process_index() == 0:
                batches.write(f"  batch {i}: loss {loss.item():.4f}")
        schedule.step()

        model.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for x, y in test_loader:
                x, y = tp.shard_batch((x, y))
                logits = model(x)
                total += F.cross_entropy(logits, y, reduction="sum").item()
                correct += (logits.argmax(1) == y).sum().item()
        loss, accuracy = total / len(test_set), correct / len(test_set)
        tp.process_index() or print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.2%}")

        best, bad = (loss, 0) if loss < best else (best, bad + 1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "epoch": epoch + 1, "best": best, "bad": bad}
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        tp.process_index() or torch.save(state, args.checkpoint)
        if bad >= args.patience:
            print("no better loss: stopped early")
            break


if __name__ == "__main__":
    main()
