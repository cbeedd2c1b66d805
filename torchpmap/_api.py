"""The public names, except those of modules: ``torchpmap`` has them all."""

from torchpmap._base.config import config
from torchpmap._base.devices import Device
from torchpmap._base.errors import (
    CallTimeout,
    CheckpointError,
    CollectiveMismatch,
    PmapError,
    RuntimeClosed,
    ShardLost,
    TensorEscaped,
    TraceError,
    WorkerDied,
    WorkerError,
)
from torchpmap._collectives import (
    all_gather,
    all_to_all,
    axis_bound,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmax,
    pmax_if_bound,
    pmean,
    pmean_if_bound,
    pmin,
    pmin_if_bound,
    ppermute,
    pshuffle,
    psum,
    psum_if_bound,
    psum_scatter,
    pswapaxes,
    ragged_all_to_all,
)
from torchpmap._layout.current_mesh import set_mesh
from torchpmap._layout.mesh import AxisType, Mesh, NamedSharding, PartitionSpec
from torchpmap._loops import (
    associative_scan,
    cond,
    fori_loop,
    map,
    scan,
    switch,
    while_loop,
)
from torchpmap._modules.batch import shard_batch
from torchpmap._modules.functional import functional
from torchpmap._modules.prefetch import prefetch
from torchpmap._modules.replicate import replicate, shard_module
from torchpmap._runtime.current import (
    default_backend,
    device_count,
    devices,
    init,
    local_device_count,
    local_devices,
    process_count,
    process_index,
    shutdown,
)
from torchpmap._runtime.meshes import make_mesh
from torchpmap._sharded.constraints import with_sharding_constraint
from torchpmap._sharded.device_put import (
    block_until_ready,
    device_get,
    device_put,
    device_put_replicated,
    device_put_sharded,
    unreplicate,
)
from torchpmap._sharded.global_view import from_dtensor, global_view, local_view, to_dtensor
from torchpmap._sharded.resize import resize
from torchpmap._sharded.tensor import Shard, ShardedTensor
from torchpmap._trace.dynamic_slices import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
)
from torchpmap._transforms.grad import grad, value_and_grad
from torchpmap._transforms.jit import jit
from torchpmap._transforms.pmap import pmap
from torchpmap._transforms.shard_map import shard_map, smap
from torchpmap._transforms.vmap import vmap
from torchpmap.profiler import MemoryStats, memory_stats

P = PartitionSpec

__all__ = [
    "AxisType",
    "CallTimeout",
    "CheckpointError",
    "CollectiveMismatch",
    "Device",
    "MemoryStats",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "PmapError",
    "RuntimeClosed",
    "Shard",
    "ShardLost",
    "ShardedTensor",
    "TensorEscaped",
    "TraceError",
    "WorkerDied",
    "WorkerError",
    "all_gather",
    "all_to_all",
    "associative_scan",
    "axis_bound",
    "axis_index",
    "axis_size",
    "block_until_ready",
    "cond",
    "config",
    "default_backend",
    "device_count",
    "device_get",
    "device_put",
    "device_put_replicated",
    "device_put_sharded",
    "devices",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "fori_loop",
    "from_dtensor",
    "functional",
    "global_view",
    "grad",
    "init",
    "jit",
    "local_device_count",
    "local_devices",
    "local_view",
    "make_mesh",
    "map",
    "memory_stats",
    "pbroadcast",
    "pcast",
    "pmap",
    "pmax",
    "pmax_if_bound",
    "pmean",
    "pmean_if_bound",
    "pmin",
    "pmin_if_bound",
    "ppermute",
    "prefetch",
    "process_count",
    "process_index",
    "pshuffle",
    "psum",
    "psum_if_bound",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
    "replicate",
    "resize",
    "scan",
    "set_mesh",
    "shard_batch",
    "shard_map",
    "shard_module",
    "shutdown",
    "smap",
    "switch",
    "to_dtensor",
    "unreplicate",
    "value_and_grad",
    "vmap",
    "while_loop",
    "with_sharding_constraint",
]
