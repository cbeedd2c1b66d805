"""The parts of ``jax``, ``jax.lax`` and ``jax.numpy`` that the stored programs use, in torch.

The programs are JAX source text. ``run`` evaluates one with ``jax``, ``lax`` and ``jnp`` bound to
the namespaces built here, so the text that produced the stored result is, word for word, what
torchpmap is asked. Nothing here computes what a collective or a transform of torchpmap computes.
"""

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import torchpmap as tp
from parity import values

LAX = [
    "psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute",
    "pshuffle", "pswapaxes", "pbroadcast", "pcast", "axis_index", "axis_size",
    "scan", "fori_loop", "while_loop", "cond", "switch", "map", "associative_scan",
]  # fmt: skip
FUNC = ["jvp", "vjp", "jacfwd", "jacrev", "hessian"]


class _Methods(ast.NodeTransformer):
    """Tensors lack two methods: ``x.astype(dtype)`` becomes ``astype(x, dtype)``, and
    ``x.at[k].set(y)`` becomes ``at_set(x, np.s_[k], y)``.
    """

    def visit_Call(self, node):
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=x, attr="astype"):
                name, before = "astype", [x]
            case ast.Attribute(ast.Subscript(ast.Attribute(x, "at"), index), "set"):
                slices = ast.Attribute(ast.Name("np", ast.Load()), "s_", ast.Load())
                name, before = "at_set", [x, ast.Subscript(slices, index, ast.Load())]
            case _:
                return node
        function = ast.Name(name, ast.Load())
        return ast.copy_location(ast.Call(function, [*before, *node.args], []), node)


def run(program, inputs, pmap, shard_map=tp.shard_map):
    """The value of a JAX program over ``inputs``, with ``pmap`` for ``jax.pmap``: statements, and
    then the expression whose value it is.
    """
    tree = ast.fix_missing_locations(_Methods().visit(ast.parse(program.strip())))
    names = {
        "jax": jax_names(pmap, shard_map),
        "lax": lax_names(),
        "jnp": jnp_names(),
        "np": np,
        "P": tp.P,
        "Mesh": tp.Mesh,
        "Auto": "Auto",
        "astype": astype,
        "at_set": at_set,
        **inputs,
    }
    return values.evaluate(tree, names)


def astype(x, dtype):
    return torch.as_tensor(x).to(dtype)


def at_set(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def jax_names(pmap, shard_map):
    return SimpleNamespace(
        pmap=pmap,
        shard_map=shard_map,
        make_mesh=tp.make_mesh,
        set_mesh=tp.set_mesh,
        devices=tp.devices,
        vmap=tp.vmap,
        grad=tp.grad,
        value_and_grad=tp.value_and_grad,
        **{name: getattr(torch.func, name) for name in FUNC},
        linear_transpose=lambda fun, *primals: torch.func.vjp(fun, *primals)[1],
        # These change no value, and torch.utils.checkpoint does not work under torch.func.
        jit=lambda fun: fun,
        checkpoint=lambda fun: fun,
        custom_vjp=CustomVjp,
        nn=SimpleNamespace(softmax=softmax, log_softmax=log_softmax),
        tree=SimpleNamespace(map=pytree.tree_map),
        random=tp.random,
        lax=lax_names(),
    )


class CustomVjp:
    """``jax.custom_vjp`` for functions of tensors that return one tensor."""

    def __init__(self, fun):
        self.fun = fun
        self.forward: Callable[..., Any] | None = None
        self.backward: Callable[..., Any] | None = None

    def defvjp(self, forward, backward):
        self.forward, self.backward = forward, backward

    def __call__(self, *args):
        return _custom_function(self.forward, self.backward).apply(*args)[0]


def _custom_function(forward_rule, backward_rule):
    # Made where it is used, so that no autograd.Function has to travel to a worker.
    spec = []

    class Custom(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args):
            out, residuals = forward_rule(*args)
            leaves, structure = pytree.tree_flatten(residuals)
            spec[:] = [structure, [isinstance(leaf, torch.Tensor) for leaf in leaves], leaves]
            return (out, *(leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*output[1:])

        @staticmethod
        def backward(ctx, cotangent, *unused):
            structure, is_tensor, leaves = spec
            saved = iter(ctx.saved_tensors)
            pairs = zip(is_tensor, leaves, strict=True)
            leaves = [next(saved) if tensor else leaf for tensor, leaf in pairs]
            return backward_rule(pytree.tree_unflatten(leaves, structure), cotangent)

    return Custom


def lax_names():
    return SimpleNamespace(
        **{name: getattr(tp, name) for name in LAX},
        stop_gradient=stop_gradient,
        bitwise_xor=torch.bitwise_xor,
        bitwise_or=torch.bitwise_or,
        dynamic_update_index_in_dim=dynamic_update_index_in_dim,
    )


def stop_gradient(x):
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, x
    )


def dynamic_update_index_in_dim(x, update, index, axis):
    return torch.select_scatter(x, update.reshape(x.select(axis, 0).shape), axis, index)


def maximum(x, y):
    return torch.maximum(torch.as_tensor(x), torch.as_tensor(y, dtype=getattr(x, "dtype", None)))


SAME_NAME = [
    "sin", "cos", "tanh", "exp", "sqrt", "abs", "where", "cumsum", "zeros_like", "moveaxis",
    "swapaxes", "broadcast_to", "reshape", "stack", "concatenate", "linspace",
    "add", "arange", "ones", "zeros", "int8", "int32", "bfloat16", "float32", "complex64",
]  # fmt: skip


def jnp_names():
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in SAME_NAME},
        maximum=maximum,
        multiply=torch.mul,
        bool_=torch.bool,
        array=torch.as_tensor,
        asarray=torch.as_tensor,
        sum=jnp_sum,
        mean=jnp_mean,
        max=jnp_max,
        min=jnp_min,
        linalg=SimpleNamespace(norm=torch.linalg.vector_norm),
    )


def _reducing(local, collective):
    """A reduction of dims and of mapped axes; ``axis=None`` means every dim."""

    def reduce(x, axis=None, keepdims=False):
        axes = axis if isinstance(axis, tuple) else (axis,)
        dims = tuple(range(x.ndim)) if axis is None else [a for a in axes if isinstance(a, int)]
        names = tuple(a for a in axes if isinstance(a, str))
        x = local(x, tuple(dims), keepdims) if dims else x
        return collective(x, names) if names else x

    return reduce


jnp_sum = _reducing(torch.sum, tp.psum)
jnp_mean = _reducing(torch.mean, tp.pmean)
jnp_max = _reducing(torch.amax, tp.pmax)
jnp_min = _reducing(torch.amin, tp.pmin)


def softmax(x, axis=-1):
    unnormalized = torch.exp(x - jnp_max(stop_gradient(x), axis, keepdims=True))
    return unnormalized / jnp_sum(unnormalized, axis, keepdims=True)


def log_softmax(x, axis=-1):
    shifted = x - jnp_max(stop_gradient(x), axis, keepdims=True)
    return shifted - torch.log(jnp_sum(torch.exp(shifted), axis, keepdims=True))
