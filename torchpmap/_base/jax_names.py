"""What to write for names of JAX that this package does not have; the rows of docs/from_jax.md."""

import sys
from collections.abc import Callable
from typing import NoReturn

_ROWS = {
    "lax sharding experimental": "no modules: tp.psum, tp.scan, tp.NamedSharding, tp.shard_map",
    "core interpreters": "not available: f.lower(x).graph is the graph",
    "soft_pmap xmap maps": "tp.pmap takes more rows than devices, and maps a mapped function",
    "jvp vjp jacfwd jacrev hessian": "torch.func. and the same name",
    "jacobian": "torch.func.jacrev",
    "linear_transpose": "torch.func.vjp",
    "custom_vjp custom_jvp custom_gradient": (
        "torch.autograd.Function with setup_context, backward and jvp"
    ),
    "remat": "torch.utils.checkpoint",
    "lower make_jaxpr": "f.lower(x).as_text(), .graph, .cost(), .certificate()",
    "linearize": "torch.func.linearize",
    "ad_checkpoint checkpoint_name checkpoint_policies": (
        "context_fn= of torch.utils.checkpoint.checkpoint"
    ),
    "eval_shape": (
        "f.lower(x).out_layouts of a mapped function: their shapes and dtypes; "
        'else f(x) with x on device="meta"'
    ),
    "ShapeDtypeStruct": 'torch.empty(shape, dtype=dtype, device="meta"), which f.lower takes',
    "get_abstract_mesh get_mesh": "not available: pass the mesh, or leave mesh= out",
    "use_mesh": "with tp.set_mesh(mesh):",
    "reshard": "tp.with_sharding_constraint(x, sharding) in a step, tp.device_put outside",
    "auto_axes explicit_axes": "leave them out: all axes are both",
    "pjit": "tp.jit",
    "pdot pgather": 'tp.psum(x @ y, "i")',
    "pvary": 'tp.pcast(x, "i", to="varying")',
    "in_pmap psum_if_pmap pmean_if_pmap": "tp.axis_bound, tp.psum_if_bound, tp.pmean_if_bound",
    "Array": "tp.ShardedTensor",
    "typeof": "x.shape, x.dtype and, on devices, x.sharding",
    "new_ref ref array_ref mutable_array": "a tensor, which is written in place",
    "host_id host_count": "tp.process_index, tp.process_count",
    "host_ids process_indices": "range(tp.process_count())",
    "default_device": "devices= of tp.pmap, and the device of tp.device_put",
    "effects_barrier": "nothing: when a result is there, what was printed before it is there too",
    "live_arrays": "not available: tp.memory_stats says how many bytes are held",
    "make_array_from_callback make_array_from_single_device_arrays": (
        "tp.device_put of the whole value; under torchrun tp.global_view of each process's rows"
    ),
    "mesh_utils create_device_mesh": "tp.make_mesh((2, 2), names)",
    "PmapSharding PositionalSharding": (
        "x.sharding of a result; to place a value: tp.device_put(x, devices) or a tp.NamedSharding"
    ),
    "clear_caches clear_backends": "tp.shutdown()",
    "distributed initialize": "nothing: start the script by torchrun",
    "multihost_utils sync_global_devices broadcast_one_to_all process_allgather assert_equal": (
        "tp.multihost.barrier, broadcast, all_gather, assert_equal"
    ),
    "host_local_array_to_global_array make_array_from_process_local_data": "tp.global_view",
    "global_array_to_host_local_array": "tp.local_view",
    "key PRNGKey split fold_in normal uniform randint": (
        "tp.random and the same name, with the same bits"
    ),
    (
        "gamma beta dirichlet poisson multivariate_normal ball binomial cauchy chisquare "
        "double_sided_maxwell generalized_normal geometric loggamma lognormal maxwell multinomial "
        "orthogonal pareto rayleigh triangular wald weibull_min"
    ): "not available: draw them in your process, and pass them to the function",
    "tree tree_util tree_map tree_leaves tree_flatten tree_unflatten tree_structure": (
        "torch.utils._pytree.tree_map and relatives; also register_pytree_node for your own classes"
    ),
    "flatten_util ravel_pytree": (
        "torch.cat([leaf.flatten() for leaf in leaves]) of leaves, spec = tree_flatten(tree); "
        "back by torch.split, view_as and tree_unflatten"
    ),
    "dynamic_update_index_in_dim": "tp.dynamic_update_slice_in_dim(x, y.unsqueeze(d), i, d)",
    "select": "torch.where",
    "stop_gradient": "x.detach()",
    "nn numpy jnp": "torch.nn.functional, torch",
    "one_hot take_along_axis": (
        "torch.nn.functional.one_hot, torch.take_along_dim, with labels.long(): indices are int64"
    ),
    "apply transform_with_state": "tp.functional(module): parameters, buffers and apply",
    "BatchNorm": 'tp.functional(module, axis_name="i")',
    "prefetch_to_device": "tp.prefetch(loader, size, stacked=True), which also cuts the batches",
    "shard pad_shard_unpad": "tp.shard_batch(batch, stacked=True): also returns a mask",
    "shard_prng_key": "tp.random.split(key, tp.device_count())",
    "onehot": "torch.nn.functional.one_hot, of labels.long()",
    "TrainState": "a tuple or a dict of parameters, buffers and the optimizer's state",
    "checkpoints orbax": "tp.checkpoint",
    "adam update": (
        "tp.optim.functional(torch.optim.Adam, lr=1e-3): update(grads, state, params) returns the"
        " new parameters, not what to add"
    ),
    "apply_updates": "not needed",
    "clip_by_global_norm global_norm": (
        "tp.optim.clip_grad_norm(grads, max_norm): returns the gradients and the norm"
    ),
    "cosine_decay_schedule join_schedules": (
        "tp.optim.schedule of CosineAnnealingLR, SequentialLR, ...: a function of the step"
    ),
    "MultiSteps": "tp.optim.accumulate(optimizer, every=n)",
    "incremental_update ema": "torch.lerp of the parameters",
    "DynamicScale jmp": (
        "torch.autocast; for float16, multiply the loss and divide the gradients yourself"
    ),
    "disable_jit": "pmap(..., compile=False), or tp.debug.fake_pmap()",
    "print breakpoint visualize_array_sharding": "tp.debug.print, breakpoint, visualize_sharding",
    "callback pure_callback io_callback host_callback": (
        "an operation of torch.library.custom_op, or compile=False"
    ),
    "trace start_trace stop_trace": "tp.profiler.trace, tp.memory_stats",
    "named_scope named_call TraceAnnotation StepTraceAnnotation annotate_function": (
        "torch.profiler.record_function with compile=False"
    ),
    "log_compiles": "tp.config.log_compiles = True",
    "enable_x64": "nothing: dtypes are kept",
    "default_matmul_precision": "torch.set_float32_matmul_precision",
    "debug_nans debug_infs": "tp.config.debug_nans = True, or tp.debug.find_nan(f, *args)",
    "transfer_guard": "not available: tp.debug.check_pmap(f, *args) compares three ways to compute",
}
"""Names, separated by blanks -> what to write instead."""


def missing_in(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module of this package, for the names that it does not have."""

    def missing(name: str) -> NoReturn:
        text = f"module {module!r} has no attribute {name!r}{_advice(name)}"
        raise AttributeError(text, name=name, obj=sys.modules.get(module))

    return missing


def _advice(name: str) -> str:
    for names, instead in _ROWS.items():
        if name in names.split():
            own, same, rest = instead.partition(" and the same name")
            text = f"{own.rstrip('.')}.{name}{rest}" if same else instead
            return f". Instead of JAX's {name}: {text} (docs/from_jax.md)."
    return ""
