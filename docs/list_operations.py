"""List the operations of models of others, and how ``tp.jit`` runs them.

    python docs/list_operations.py > docs/operations.md

It needs torchvision, timm and transformers.  Models are made from their configurations: nothing is
downloaded, compiled or run.  A training step of each is traced, and written for four devices that
have a quarter of the batch each.
"""

from __future__ import annotations

import collections
import importlib.metadata
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import torchpmap as tp
from torchpmap._base.torch_internals import OpOverload
from torchpmap._sharded.spread import Spread, Value

SIZE, WIDTH = 64, 125
PICTURES = (torch.zeros(8, 3, SIZE, SIZE), torch.zeros(8, dtype=torch.long))
TOKENS = (torch.zeros(8, 16, dtype=torch.long), torch.zeros(8, dtype=torch.long))
Make = Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10, "pad_token_id": 0}
SMALL = HEADS | {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}


def of_torchvision(name: str, **options: Any) -> Make:
    def make() -> Any:
        import torchvision

        return torchvision.models.get_model(name, num_classes=10, **options), PICTURES

    return make


def of_timm(name: str, **options: Any) -> Make:
    def make() -> Any:
        import timm

        return timm.create_model(name, num_classes=10, **options), PICTURES

    return make


def of_transformers(name: str, **options: Any) -> Make:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**SMALL | options)
        return getattr(transformers, f"{name}ForSequenceClassification")(config), TOKENS

    return make


MODELS: dict[str, Make] = {
    **{
        f"torchvision {name}": of_torchvision(name)
        for name in (
            *("resnet18", "densenet121", "mobilenet_v3_small", "efficientnet_b0", "vgg11_bn"),
            *("squeezenet1_1", "shufflenet_v2_x0_5", "regnet_y_400mf", "convnext_tiny", "swin_t"),
        )
    },
    "torchvision vit_b_32": of_torchvision("vit_b_32", image_size=SIZE),
    **{
        f"timm {name}": of_timm(name)
        for name in (
            *("resnet26d", "mobilenetv3_small_050", "convnext_atto", "nfnet_l0"),
            "hrnet_w18_small",
        )
    },
    "timm vit_tiny_patch16_224": of_timm("vit_tiny_patch16_224", img_size=SIZE),
    "timm mixer_s32_224": of_timm("mixer_s32_224", img_size=SIZE),
    "transformers GPT2": of_transformers("GPT2", n_embd=32, n_layer=2, n_head=4),
    "transformers GPTNeoX": of_transformers("GPTNeoX"),
    "transformers Llama": of_transformers("Llama", num_key_value_heads=2),
    "transformers Mistral": of_transformers("Mistral", num_key_value_heads=2),
    "transformers Qwen2": of_transformers("Qwen2", num_key_value_heads=2),
    "transformers OPT": of_transformers("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "transformers Bloom": of_transformers("Bloom", n_layer=2, n_head=4),
    "transformers Bert": of_transformers("Bert"),
    "transformers Roberta": of_transformers("Roberta"),
    "transformers DistilBert": of_transformers(
        "DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64
    ),
    "transformers DebertaV2": of_transformers("DebertaV2"),
    "transformers Electra": of_transformers("Electra", embedding_size=32),
    "transformers Albert": of_transformers("Albert", embedding_size=16),
}


found: collections.Counter[tuple[str, str]] = collections.Counter()
"""How often an operation was written in a way."""
_own = Spread._written


def noted(self: Spread, node: torch.fx.Node) -> Any:
    """Write a node for a device, and note how."""
    before = len(self.reshards)
    result = _own(self, node)
    if isinstance(node.target, OpOverload):
        values = [self._values.get(source) for source in node.all_input_nodes]
        is_cut = any(isinstance(value, Value) and value.cut for value in values)
        how = "sent" if len(self.reshards) > before else "blocks" if is_cut else "equal"
        found[node.target.overloadpacket.__name__, how] += 1
    return result


def step_of(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = F.cross_entropy(getattr(output, "logits", output), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def listed(names: list[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), WIDTH)


def main() -> None:
    warnings.simplefilter("ignore")
    tp.init(4, device_type="cpu")
    Spread._written = noted  # type: ignore[method-assign]
    rows, every = [], collections.defaultdict(set)
    for name, make in MODELS.items():
        found.clear()
        model, batch = make()
        tp.replicate(model)
        tp.jit(step_of(model), fullgraph=True).lower(*tp.shard_batch(batch))
        for operation, how in found:
            every[how].add(operation)
        sent = listed(sorted(operation for operation, how in found if how == "sent"))
        kinds = len({operation for operation, _ in found})
        rows.append(f"| {name} | {found.total():,} | {kinds} | {sent or '-'} |")
    libraries = ("torch", "torchvision", "timm", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    parts = {"blocks": every["blocks"], "equal": every["equal"] - every["blocks"]}
    lists = {how: listed(sorted(operations)) for how, operations in parts.items()}
    texts = {
        "introduction": INTRODUCTION.format(versions=versions),
        "reasons": REASONS,
        "equal_values": EQUAL,
    }
    texts = {name: textwrap.fill(text, WIDTH) for name, text in texts.items()}
    print(PAGE.format(rows="\n".join(rows), **texts, **lists), end="")


INTRODUCTION = (
    "Made by `docs/list_operations.py` with {versions}. A training step of each model, with SGD, "
    "was traced by [`tp.jit`](training.md) with `fullgraph=True`, with replicated parameters and a "
    "batch that is cut over four devices. Nothing was changed in the models. *Operations* are "
    "those of the whole step; *sent around* are those whose operands could not be taken as they "
    "lie, so that devices exchange them (`step.lower(x, y).resharded` names the lines)."
)
REASONS = (
    "`index` picks the last token of each row. `as_strided` belongs to the pooling of pictures "
    "that are stored channels last."
)
EQUAL = (
    "These met only values that are equal on all devices, and every device computes them for "
    "itself (masks, positions, random numbers, parameters in the optimizer):"
)
PAGE = """\
# Models of others

{introduction}

| model | operations | kinds | sent around |
|---|---|---|---|
{rows}

{reasons}

These operations run on blocks, without communication but for sums:

{blocks}

{equal_values}

{equal}
"""


if __name__ == "__main__":
    main()
