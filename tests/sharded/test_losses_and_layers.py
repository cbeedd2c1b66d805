"""Covers: _sharded/layers.py, rules/layers.py: layers and losses on a batch cut over devices."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from _sharded_values import each, functions, nothing_gathers, on_mesh
from _support import DEVICE
from torch import nn

import torchpmap as tp
from torchpmap._sharded import layers

pytestmark = pytest.mark.usefixtures("pool")

sizes = pytest.mark.parametrize("pool", [1, 4], indirect=True)
"""Next to the function, so that a pool starts only once for each."""
IMAGES, ROWS = (8, 4, 6, 6), (8, 6)


def cut(x):
    return on_mesh(x, ("i",), (tp.device_count(),))


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def close(result, expected):
    # attention and LSTMs of GPUs multiply float32 with fewer digits
    tolerance = 1e-5 if DEVICE == "cpu" else 5e-4
    torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=tolerance)


LAYERS = """
    nn.BatchNorm2d(4); nn.BatchNorm1d(6); nn.BatchNorm2d(4, affine=False)
    nn.BatchNorm2d(4, track_running_stats=False); nn.BatchNorm2d(4, momentum=None)
    nn.BatchNorm2d(4).eval(); nn.BatchNorm2d(4).requires_grad_(False); nn.GroupNorm(2, 4)
    nn.AdaptiveMaxPool2d(2); nn.ReflectionPad2d(1)
"""


@each("make", "", LAYERS)
@pytest.mark.parametrize("put", [cut, tp.replicate])
@sizes
def test_layers(make, put, pool):
    plain = make()
    x = draw(*(ROWS if isinstance(plain, nn.BatchNorm1d) else IMAGES)) * 3 + 2
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.uniform_(0.5, 2)
    assert not check_module(plain, x, put, steps=2)


def test_batch_norms():
    module, plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6)  # with statistics of this process
    x = draw(*ROWS)
    close(module(cut(x)).detach(), plain(x).detach())
    close(module.running_var, plain.running_var)
    assert not check_module(nn.BatchNorm1d(6), draw(tp.device_count(), 6))  # a row per device
    x = draw(*IMAGES) + 1000
    module = nn.BatchNorm2d(4)._apply(tp.replicate)
    module(cut(x))
    expected = (0.9 + 0.1 * x.double().var((0, 2, 3))).float()  # with all its digits
    torch.testing.assert_close(module.running_var.cpu(), expected, rtol=1e-4, atol=0)


TARGETS = torch.tensor([0, 5, 1, -100, 3, 2, 1, 0])
CLASSES = {
    "mean": lambda x, y: F.cross_entropy(x, y),
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: (F.cross_entropy(x, y, reduction="none") ** 2).mean(),
    "weights": lambda x, y: F.cross_entropy(x, y, weight=torch.arange(1.0, 7)),
    "smooth": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "images": lambda x, y: F.cross_entropy(
        x[:, :, None, None].expand(-1, -1, 2, 1), y[:, None, None].expand(-1, 2, 1).contiguous()
    ),
}
NUMBERS = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y, reduction=reduction),
}


def loss_of(result):
    return result.square().sum() if result.ndim else result


def check(there, here, *values):
    """Results and gradients of two functions, of cut and of plain values; nothing is gathered."""
    plain = [x.clone().requires_grad_() for x in values]
    mine = [cut(x).requires_grad_() for x in values]
    expected = here(*plain)
    loss_of(expected).backward()
    with nothing_gathers():
        result = there(*mine)
        loss_of(result).backward()
    close(result.detach(), expected.detach())
    for one, other in zip(mine, plain, strict=True):
        close(one.grad, other.grad)


def check_loss(loss, target):
    check(lambda x: loss(x, cut(target)), lambda x: loss(x, target), draw(*ROWS))


@pytest.mark.parametrize("name", CLASSES)
@sizes
def test_losses_of_classes(name, pool):
    check_loss(CLASSES[name], TARGETS)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", NUMBERS)
@sizes
def test_losses_of_numbers(name, reduction, pool):
    check_loss(lambda x, y: NUMBERS[name](x, y, reduction=reduction).sum(), draw(*ROWS).sigmoid())


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's assert ends its worker")
def test_a_target_without_a_class_raises_where_the_loss_is_used():
    loss = F.cross_entropy(cut(draw(*ROWS)), cut(torch.full((8,), 6)))
    with pytest.raises(IndexError, match="Target 6 is out of bounds"):
        loss.item()


def check_attention(mine, theirs):
    """``mine`` and ``theirs`` are the options on the devices and of plain torch."""
    attention, heads = F.scaled_dot_product_attention, [draw(4, 2, 5, 4) + k for k in range(3)]
    check(lambda *x: attention(*x, **mine), lambda *x: attention(*x, **theirs), *heads)


@pytest.mark.parametrize("option", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_attention_stays_on_the_devices(option):
    check_attention(option, option)


MASKS = {
    "of positions": (5, 5),
    "of all": (1, 1, 5, 5),
    "of rows": (4, 1, 5, 5),
    "of heads": (1, 2, 5, 5),
    "of rows and heads": (4, 2, 5, 5),
}
PUTS = {"host": lambda mask: mask, "whole": tp.replicate, "cut": tp.shard_batch}


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_attention_with_a_mask_stays_on_the_devices(shape, dtype, put):
    mask = draw(*shape)
    if dtype is torch.bool:
        mask = (mask > 0) | torch.eye(5, dtype=torch.bool)  # no row without a position
    check_attention({"attn_mask": put(mask)}, {"attn_mask": mask})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:TransformerEncoderLayer is on the devices")
def test_an_encoder_evaluates_padded_rows():
    """In torch it makes nested tensors of them, unless they need gradients."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, lengths = draw(8, 5, 8), torch.tensor([5, 3, 4, 5, 1, 2, 5, 3])
    padded = torch.arange(5) >= lengths[:, None]
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padded)
        result = tp.replicate(encoder)(cut(x), src_key_padding_mask=cut(padded))
    close(result.cpu()[~padded], expected[~padded])


DRAWS = functions(
    "x",
    """
    x.bernoulli_(); x.exponential_(); x.normal_(); x.random_(); x.uniform_()
    F.dropout(x, 0.4); torch.rand_like(x)
    """,
)


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_fetch_nothing_and_are_those_of_one_device(name):
    x, plain = cut(draw(8, 3)), draw(8, 3)
    torch.manual_seed(0)
    with tp.debug.report_gathers() as gathers:
        result = DRAWS[name](x)
    drawn_next = torch.rand(4)
    assert gathers == []
    assert (result is x) == ("_()" in name)
    assert result.sharding.spec == tp.P("i")
    torch.manual_seed(0)
    assert torch.equal(result.cpu(), DRAWS[name](plain))
    assert torch.equal(drawn_next, torch.rand(4))


def check_module(plain, x, put=cut, steps=1):
    """Steps on the devices and here; what is listed as gathered."""
    module = copy.deepcopy(plain)._apply(tp.replicate)
    here, there = x.clone().requires_grad_(), put(x).requires_grad_()
    with tp.debug.report_gathers() as gathers:
        for _ in range(steps):
            module.zero_grad()
            plain.zero_grad()
            here.grad = there.grad = None
            results = [torch.utils._pytree.tree_leaves(y) for y in (plain(here), module(there))]
            for leaves in results:
                sum((leaf * leaf.detach().sin()).mean() for leaf in leaves).backward()
    for expected, result in zip(*results, strict=True):
        close(result.detach(), expected.detach())
    if put is not torch.clone and not gathers:
        assert {type(x) for x in (*results[1], *module.buffers(), there.grad)} == {tp.ShardedTensor}
    pairs = [(here, there), *zip(plain.parameters(), module.parameters(), strict=True)]
    pairs = [(mine.grad, theirs.grad) for mine, theirs in pairs]
    for mine, theirs in (*pairs, *zip(plain.buffers(), module.buffers(), strict=True)):
        if mine is None:
            assert theirs is None
        else:
            close(theirs, mine)
    return gathers


class Started(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 3)
        self.start = nn.Parameter(draw(1, 8, 3))

    def forward(self, x):
        y, (h, _) = self.rnn(x.transpose(0, 1), (self.start, self.start.cos()))
        return y, h


LSTM = functools.partial(nn.LSTM, 4, 3, batch_first=True)
LSTMS = {
    "one": LSTM,
    "two": lambda: LSTM(num_layers=2),
    "both": lambda: LSTM(bidirectional=True),
    "both of two": lambda: LSTM(bidirectional=True, num_layers=2),
    "no biases": lambda: LSTM(bias=False, num_layers=2),
    "starts anywhere": Started,
}


@pytest.mark.parametrize("make", LSTMS.values(), ids=LSTMS)
@sizes
@pytest.mark.long("both of two")
def test_an_lstm_stays_on_the_devices(make, pool):
    torch.manual_seed(0)
    plain = make()
    assert not check_module(plain, draw(8, 5, 4))
    plain.zero_grad()
    assert not check_module(plain.eval().requires_grad_(False), draw(8, 5, 4))


@pytest.mark.filterwarnings("ignore:(GRU|RNN) is on the devices, but its operation")
@pytest.mark.parametrize("put", [tp.replicate, torch.clone, cut])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, put):
    torch.manual_seed(0)
    check_module(kind(4, 4, batch_first=True), draw(4, 3, 4), put)


def test_the_derivative_of_an_lstm_that_gathers():
    """The forward pass is on the devices, and the gradient cannot be."""
    torch.manual_seed(0)
    plain = nn.LSTM(4, 3)
    module = tp.replicate(copy.deepcopy(plain))
    x = tp.replicate(draw(5, 8, 4)).requires_grad_()
    y, _ = module(x)
    here = draw(5, 8, 4).requires_grad_()
    expected, _ = plain(here)
    grad = draw(8, 5, 3).transpose(0, 1)
    y.backward(on_mesh(grad.contiguous(), (None, "i")))
    expected.backward(grad)
    close(x.grad, here.grad)
    close(module.weight_hh_l0.grad, plain.weight_hh_l0.grad)


OPTIONS = [
    *({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": draw(5, 5)}),
    {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[str(list(x)) for x in OPTIONS])
def test_attention_of_other_devices_is_that_of_the_cpu(options):
    """What GPUs run: the kernel that torch chooses there, and gradients without its secrets."""
    heads = [draw(2, 3, 5, 4), draw(3, 2, 5, 4).transpose(0, 1).cos(), draw(2, 3, 5, 4).sin()]
    grad = draw(2, 3, 5, 4) + 1
    rest = 0.0, options.get("is_causal", False)
    named = {name: x for name, x in options.items() if name != "is_causal"}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    by_cpu = dict(named)
    if "attn_mask" in named and named["attn_mask"].dtype == torch.bool:
        by_cpu["attn_mask"] = torch.zeros(5, 5).masked_fill(~named["attn_mask"], -torch.inf)
    y, kept = attention(*heads, *rest, **by_cpu)
    close(layers.attention_by_torch(*heads, *rest, **named), y)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    expected = backward(grad, *heads, y, kept, *rest, **by_cpu)
    gradients = layers.attention_backward_by_torch(grad, *heads, y, kept, *rest, **named)
    for mine, theirs in zip(gradients, expected, strict=True):
        close(mine, theirs)
