"""Covers: random: what its functions refuse, and what they say."""

from functools import partial

import numpy as np
import pytest
import torch

import torchpmap as tp
from torchpmap import random

KEY = random.key(0)
KEYS = random.split(KEY, 4)
FLOATS = "expected float32, float64, float16 or bfloat16."
CONTINUOUS = {
    "uniform": (),
    "normal": (),
    "truncated_normal": (-1.0, 1.0),
    "exponential": (),
    "gumbel": (),
    "laplace": (),
    "logistic": (),
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random.key(1.5), TypeError,
         "key: got a seed of type float, expected an int or an integer tensor."),
        (lambda: random.key(2**63), ValueError,
         "key: got seed 9223372036854775808, expected a 64-bit integer. Only its low "
         "32 bits count: take 9223372036854775808 % 2**32."),
        (lambda: random.key(torch.tensor(1.0)), TypeError,
         "key: got seed of dtype float32, expected an int or an integer tensor."),
        (lambda: random.key(torch.tensor([1, 2])), TypeError,
         "key: got seed of shape (2,), expected one number, of shape (). Map the function over "
         "the numbers with torchpmap.vmap."),
        (lambda: random.split(0), TypeError,
         "split: got a key of type int, expected a tensor. Make a key from a seed: "
         "torchpmap.random.key(0)."),
        (lambda: random.normal(KEY.to(torch.uint32)), TypeError,
         "normal: got a key of dtype uint32, expected int64. Make a key with "
         "torchpmap.random.key(0), or convert the two 32-bit words of jax.random.key_data with "
         ".to(torch.int64)."),
        (lambda: random.uniform(KEYS), ValueError,
         "uniform: got a batch of keys of shape (4, 2), expected one key, of shape (2,). Map "
         "the function over the batch: torchpmap.vmap(lambda key: "
         "torchpmap.random.uniform(key, ...))(keys)."),
        (lambda: random.bits(torch.zeros(3, dtype=torch.int64)), ValueError,
         "bits: got a key of shape (3,), expected shape (2,). Make a key with "
         "torchpmap.random.key(0)."),
        (lambda: random.split(KEY, -1), ValueError,
         "split: got num=-1, expected the number of keys, 0 or more."),
        (lambda: random.split(KEY, (2, -3)), ValueError,
         "split: got shape (2, -3), expected no negative size."),
        (lambda: random.split(KEY, 2.0), TypeError,
         "split: got num=2.0, expected an int or a tuple of ints."),
        (lambda: random.fold_in(KEY, -1), ValueError,
         "fold_in: got data -1, expected 0 to 2**32 - 1. Fold in a larger number piece by piece."),
        (lambda: random.fold_in(KEY, 0.5), TypeError,
         "fold_in: got data of type float, expected an int or an integer tensor."),
        (lambda: random.fold_in(KEY, torch.arange(3)), TypeError,
         "fold_in: got data of shape (3,), expected one number, of shape (). Map the function "
         "over the numbers with torchpmap.vmap."),
        (lambda: random.bits(KEY, (2,), torch.int32), ValueError,
         "bits: got dtype torch.int32, expected uint8, uint16, uint32 or uint64."),
        (lambda: random.choice(KEY, 5, 3), TypeError,
         "choice: got shape 3, expected a tuple of sizes: shape=(3,)."),
        (lambda: random.normal(KEY, (2.0,)), TypeError,
         "normal: got shape (2.0,), expected a tuple of ints."),
        (lambda: random.normal(KEY, 2.0), TypeError,
         "normal: got shape 2.0, expected a tuple of ints."),
        (lambda: random.normal(KEY, None), TypeError,
         "normal: got shape None, expected a tuple of ints."),
        (lambda: random.gumbel(KEY, (2, -1)), ValueError,
         "gumbel: got shape (2, -1), expected no negative size."),
        *(
            (partial(getattr(random, name), KEY, *limits, dtype=torch.int32), ValueError,
             f"{name}: got dtype torch.int32, {FLOATS}")
            for name, limits in CONTINUOUS.items()
        ),
        (lambda: random.uniform(KEY, (2,), minval=torch.zeros(3)), ValueError,
         "uniform: got minval of shape (3,), expected one that broadcasts to the shape of the "
         "result, (2,)."),
        (lambda: random.truncated_normal(KEY, 1.0, 1.0), ValueError,
         "truncated_normal: got lower=1.0 and upper=1.0, expected lower < upper."),
        (lambda: random.bernoulli(KEY, 1.5), ValueError,
         "bernoulli: got p=1.5, expected a probability between 0 and 1."),
        (lambda: random.bernoulli(KEY, float("nan")), ValueError,
         "bernoulli: got p=nan, expected a probability between 0 and 1."),
        (lambda: random.bernoulli(KEY, 1), TypeError,
         "bernoulli: got p of type int, expected a float or a floating-point tensor."),
        (lambda: random.bernoulli(KEY, torch.tensor([0.5, 0.1]), ()), ValueError,
         "bernoulli: got p of shape (2,), expected one that broadcasts to the shape of the "
         "result, ()."),
        (lambda: random.rademacher(KEY, (2,), torch.uint8), TypeError,
         "rademacher: got dtype torch.uint8, expected one that can hold -1."),
        (lambda: random.randint(KEY, (2,), 5, 5), ValueError,
         "randint: got minval=5 and maxval=5, expected minval < maxval."),
        (lambda: random.randint(KEY, (2,), 0, 2.5), TypeError,
         "randint: got maxval of dtype float32, expected an integer, at most int64."),
        (lambda: random.randint(KEY, (2,), 0, 5, torch.float32), TypeError,
         "randint: got dtype torch.float32, expected int8, int16, int32, int64 or uint8."),
        (lambda: random.permutation(KEY, -1), ValueError,
         "permutation: got x=-1, expected a number of at least 0."),
        (lambda: random.permutation(KEY, torch.tensor(5)), TypeError,
         "permutation: got x of shape (), expected an int (not a tensor: the shape of the "
         "result depends on it) or a tensor of at least one dim."),
        (lambda: random.permutation(KEY, torch.ones(2, 3), 2), IndexError,
         "permutation: got axis=2, expected a dim of a tensor of shape (2, 3)."),
        (lambda: random.choice(KEY, 0, (2,)), ValueError,
         "choice: got 2 draws from nothing, expected at least one to pick."),
        (lambda: random.choice(KEY, 3, (2, 2), replace=False), ValueError,
         "choice: got 4 draws from 3 without replacement, expected at most 3."),
        (lambda: random.choice(KEY, torch.tensor(3)), TypeError,
         "choice: got a of shape (), expected an int or a tensor with a dim."),
        (lambda: random.choice(KEY, 3, p=[0.5, 0.5]), ValueError,
         "choice: got p of shape (2,), expected 3 real numbers, one per number or row to pick: "
         "shape (3,)."),
        (lambda: random.choice(KEY, 2, p=[1.5, -0.5]), ValueError,
         "choice: got p=[1.5, -0.5], expected probabilities: numbers of at least 0, not all 0."),
        (lambda: random.choice(KEY, 2, p=[0, 0]), ValueError,
         "choice: got p=[0, 0], expected probabilities: numbers of at least 0, not all 0."),
        (lambda: random.categorical(KEY, torch.tensor([1, 2])), ValueError,
         f"categorical: got dtype torch.int64, {FLOATS}"),
        (lambda: random.categorical(KEY, torch.zeros(3, 2), shape=(4,)), ValueError,
         "categorical: got logits, without the categories, of shape (3,), expected one that "
         "broadcasts to the shape of the result, (4,)."),
        (lambda: random.categorical(KEY, torch.zeros(2), shape=(3,), replace=False), ValueError,
         "categorical: got shape (3,) without replacement, 3 draws, expected at most the 2 "
         "categories, and the shape to end in ()."),
        (lambda: random.categorical(KEY, torch.zeros(3, 0)), ValueError,
         "categorical: got no categories, expected at least one along axis."),
        (lambda: random.categorical(KEY, torch.tensor(1.0)), IndexError,
         "categorical: got axis=-1, expected a dim of a tensor of shape ()."),
    ],
)  # fmt: skip
def test_misuse(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == message


def test_misuse_inside_pmap_is_an_error_of_the_caller(pool):
    with pytest.raises(ValueError, match=r"normal: got a batch of keys of shape \(2, 2\)"):
        tp.pmap(random.normal)(random.split(KEY, (4, 2)))


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (lambda: random.key(np.int32(5)), lambda: random.key(5)),
        (lambda: random.fold_in(KEY, np.uint8(5)), lambda: random.fold_in(KEY, 5)),
        (lambda: random.split(KEY, np.int64(3)), lambda: random.split(KEY, 3)),
        (lambda: random.normal(KEY, 3), lambda: random.normal(KEY, (3,))),
        (lambda: random.randint(KEY, np.int64(3), 0, 9), lambda: random.randint(KEY, (3,), 0, 9)),
        (lambda: random.categorical(KEY, torch.zeros(4), shape=3),
         lambda: random.categorical(KEY, torch.zeros(4), shape=(3,))),
        (lambda: random.bits(KEY, [2, 3]), lambda: random.bits(KEY, (2, 3))),
        (lambda: random.bits(KEY, torch.ones(2, 3).shape), lambda: random.bits(KEY, (2, 3))),
        (lambda: random.bernoulli(KEY, np.array([0.2, 0.7], np.float32)),
         lambda: random.bernoulli(KEY, torch.tensor([0.2, 0.7]))),
        (lambda: random.choice(KEY, np.arange(4), (3,), p=np.array([1, 2, 3, 4])),
         lambda: random.choice(KEY, 4, (3,), p=[1, 2, 3, 4])),
        (lambda: random.randint(KEY, (3,), np.int64(2), np.array([5, 6, 7])),
         lambda: random.randint(KEY, (3,), 2, torch.tensor([5, 6, 7]))),
    ],
)  # fmt: skip
def test_numbers_and_arrays_of_numpy_are_taken(given, plain):
    assert given().tolist() == plain().tolist()
