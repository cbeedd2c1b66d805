"""Covers: random/_answers.py, _trace/transform_rules.py: attention and layers with dropout.

A mask is read from what attention gives for the identity as values.  Then everything else is known
exactly: the result, and every derivative, for that mask.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from _support import EAGER, mostly_long
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

P = 0.4
torch.manual_seed(1)
Q, K = torch.randn(2, 8, 2, 6, 4).double()  # [row, head, position, feature]
EYE = torch.eye(6).double().expand(2, 6, 6)


def attend(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P, **options)


def weights_of(q, k, bias=0.0):
    return (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)


def seeded(f, *rows, mode=EAGER, **options):
    torch.manual_seed(0)
    out = tp.pmap(f, compile=mode, **options)(*rows)
    return tuple(x.cpu() for x in out) if isinstance(out, tuple) else out.cpu()


def masks(q=Q, k=K):
    """1 / (1 - P) where a weight is kept, else 0."""
    scale = seeded(lambda q, k: attend(q, k, EYE), q, k) / weights_of(q, k)
    kept = scale > 0
    torch.testing.assert_close(scale, kept.double() / (1 - P))
    return scale


def test_masks_are_the_rows_own_and_keep_as_often_as_they_should():
    scale = masks()
    assert len({str(row) for row in scale.tolist()}) == 8
    large = torch.zeros(4, 1, 100, 4).double()
    eye = torch.eye(100).double()[None]
    kept = seeded(lambda q: attend(q, q, eye), large) > 0
    assert kept.double().mean((1, 2, 3)).tolist() == pytest.approx([1 - P] * 4, abs=0.025)
    correlations = torch.corrcoef(kept.double().flatten(1)) - torch.eye(4)
    assert correlations.abs().max() < 0.05


@pytest.mark.parametrize("rows", [4, 8])  # one or two on a device
def test_derivatives_use_the_mask_of_the_result(mode, rows):
    q, k = Q[:rows], K[:rows]
    scale = masks()[:rows]

    def loss(q, k):
        return (attend(q, k, k) ** 2).sum()

    def both(q, k):
        value, grads = tp.value_and_grad(loss, argnums=(0, 1))(q, k)
        return value, *grads

    value, *grads = seeded(both, q, k, mode=mode)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    expected = (((weights_of(*leaves) * scale) @ leaves[1]) ** 2).sum((1, 2, 3))
    torch.testing.assert_close(value, expected.detach())
    expected.sum().backward()
    torch.testing.assert_close(grads, [leaf.grad for leaf in leaves])

    outside = q.clone().requires_grad_()
    torch.manual_seed(0)
    tp.pmap(loss, compile=mode)(outside, k).sum().backward()
    wanted = q.clone().requires_grad_()
    (((weights_of(wanted, k) * scale) @ k) ** 2).sum().backward()
    torch.testing.assert_close(outside.grad, wanted.grad)

    tangent = torch.cos(q)
    got = seeded(
        lambda q, k, t: jvp(lambda q: attend(q, k, k), (q,), (t,)), q, k, tangent, mode=mode
    )
    want = jvp(lambda q: (weights_of(q, k) * scale) @ k, (q,), (tangent,))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("preserve", [True, False])
def test_a_recomputed_attention_has_the_same_mask(preserve, mode):
    def loss(again):
        def f(q, k):
            if not again:
                return attend(q, k, k).square().sum()
            out = checkpoint(attend, q, k, k, use_reentrant=False, preserve_rng_state=preserve)
            return out.square().sum()

        return f

    plain, again = (seeded(tp.grad(loss(a)), Q[:4], K[:4], mode=mode) for a in (False, True))
    torch.testing.assert_close(again, plain)


def test_under_vmap_and_in_loops(mode):
    def lanes(q, k):
        return tp.vmap(lambda q: attend(q, k[:1], EYE[:1]))(q[:, None])

    kept = seeded(lanes, Q, K, mode=mode) > 0
    assert len({str(lane) for row in kept.tolist() for lane in row}) == 16
    with pytest.raises(RuntimeError, match="randomness error mode"):
        seeded(lambda q: torch.func.vmap(lambda q: attend(q, q, EYE[:1]))(q[:, None]), Q, mode=mode)

    def steps(q):
        def body(carry, _):
            return carry, attend(carry, carry, EYE)

        return tp.scan(body, q, None, length=3)[1]

    kept = seeded(steps, Q, mode=mode) > 0
    assert len({str(step) for row in kept.tolist() for step in row}) == 24


def test_arguments_of_attention():
    upper = torch.ones(6, 6).tril().logical_not()
    bias = torch.zeros(6, 6).double().masked_fill(upper, -math.inf)
    scale = seeded(lambda q, k: attend(q, k, EYE, attn_mask=bias), Q[:4], K[:4])
    for options in ({"is_causal": True}, {"attn_mask": ~upper}):
        got = seeded(lambda q, k, o=options: attend(q, k, EYE, **o), Q[:4], K[:4])
        torch.testing.assert_close(got, scale)
    assert (scale[..., upper] == 0).all()
    few = K[:4, :1]
    grouped = seeded(lambda q, k: attend(q, k, k, enable_gqa=True), Q[:4], few)
    wide = few.expand(4, 2, 6, 4)
    torch.testing.assert_close(grouped, seeded(lambda q, k: attend(q, k, k), Q[:4], wide))
    half = seeded(lambda q, k: attend(q, k, k, scale=0.3), Q[:4].bfloat16(), K[:4].bfloat16())
    assert half.dtype == torch.bfloat16
    nothing = seeded(
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1.0), Q[:4].contiguous()
    )
    assert (nothing == 0).all()


def test_attention_without_dropout_draws_nothing_and_differentiates():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, 2, 8, 4).double()  # [device, batch, head, position, feature]

    def plain_attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def loss(q, k, v):
        return (plain_attend(q, k, v) ** 2).sum()

    causal = torch.zeros(8, 8).double().masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    got = tp.pmap(plain_attend, compile=EAGER)(q, k, v).cpu()
    assert torch.equal(torch.rand(2), expected)
    torch.testing.assert_close(got, weights_of(q, k, causal) @ v)
    grads = tp.pmap(tp.grad(loss, argnums=(0, 2)), compile=EAGER)(q, k, v)
    q, v = q.requires_grad_(), v.requires_grad_()
    ((weights_of(q, k, causal) @ v) ** 2).sum().backward()
    torch.testing.assert_close(grads[0].cpu(), q.grad)
    torch.testing.assert_close(grads[1].cpu(), v.grad)


def encoder(dropout, batch_first):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=batch_first)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decode(layer, x):
    return layer(x, x.flip(1), tgt_is_causal=True, tgt_mask=torch.zeros(5, 5))


def attend_to_itself(layer, x):
    out, weights = layer(x, x, x)
    return out + weights.sum()


def recur(layer, x):
    return layer(x)[0]


LAYERS = {
    "encoder": (encoder, lambda layer, x: layer(x)),
    "decoder": (partial(torch.nn.TransformerDecoderLayer, 8, 2, 16), decode),
    "attention": (partial(torch.nn.MultiheadAttention, 8, 2), attend_to_itself),
    "lstm": (partial(torch.nn.LSTM, 8, 8, 2), recur),
    "gru": (partial(torch.nn.GRU, 8, 8, 2, bidirectional=True), recur),
    "rnn": (partial(torch.nn.RNN, 8, 8, 2), recur),
}


@pytest.mark.parametrize("name", mostly_long(LAYERS, "encoder"))
def test_layers_with_dropout_train(name):
    torch.manual_seed(2)
    x = torch.randn(1, 2, 5, 8).expand(8, 2, 5, 8)  # equal rows: what differs is drawn

    def value_and_grad(p, mode, rows):
        torch.manual_seed(3)
        make, use = LAYERS[name]
        model = make(dropout=p, batch_first=True)
        params = {key: value.detach() for key, value in model.named_parameters()}

        def loss(params, x):
            def layer(*args, **options):
                return functional_call(model, params, args, options)

            return (use(layer, x) ** 3).sum()

        torch.manual_seed(0)
        value, grads = tp.pmap(tp.value_and_grad(loss), in_axes=(None, 0), compile=mode)(
            params, rows
        )
        plain, wanted = torch.func.grad_and_value(loss)(params, x[0])[::-1]
        flat = torch.stack([grad.flatten(1).cpu().norm(dim=1) for grad in grads.values()], 1)
        return value.cpu(), flat, plain, torch.stack([w.norm() for w in wanted.values()])

    value, grads, plain, wanted = value_and_grad(0.0, EAGER, x[:4])
    torch.testing.assert_close(value, plain.expand(4))
    torch.testing.assert_close(grads, wanted.expand(4, -1))
    value, grads, *_ = value_and_grad(0.3, EAGER, x)
    assert len(set(value.tolist())) == 8
    assert grads.isfinite().all()
    for mode, rows in ((EAGER, x[:4]), (False, x[:4]), (False, x)):
        again, same, *_ = value_and_grad(0.3, mode, rows)
        torch.testing.assert_close(again, value[: len(rows)])
        torch.testing.assert_close(same, grads[: len(rows)])
