"""Covers: _base/platform.py, and that no other module knows of kinds of accelerators."""

import ast
import contextlib
import os
import re
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _launched import run_program
from _platforms import SharedCuda
from _through_host import ThroughHost

import torchpmap as tp
from torchpmap._base.config import Config
from torchpmap._base.devices import CUDA, PLATFORMS
from torchpmap._base.errors import GroupLost
from torchpmap._base.platform import Accelerator, Cuda, Owned, Platform
from torchpmap._base.torch_groups import group_named
from torchpmap._runtime.groups import process_groups

pytestmark = pytest.mark.cpu_only("it expects the kinds of devices as they are without settings")

PACKAGE = Path(tp.__file__).parent


def strings(path):
    """The string literals of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [x.value for x in constants if isinstance(x.value, str) and id(x) not in texts]


def test_one_file_names_cuda():
    naming = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(re.search(r"\bcuda\b", text) for text in strings(path))
    }
    assert naming == {"_base/platform.py"}


SEEN, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
OF_AMD, OF_INTEL = (HIP, SEEN), PLATFORMS["xpu"].variables


@pytest.mark.parametrize(
    ("variables", "given", "shown"),
    [
        (CUDA.variables, {}, {SEEN: "1"}),
        (CUDA.variables, {SEEN: ""}, {SEEN: "1"}),
        (CUDA.variables, {SEEN: "4,6"}, {SEEN: "6"}),
        (CUDA.variables, {SEEN: "MIG-a, MIG-b"}, {SEEN: "MIG-b"}),
        (OF_AMD, {}, {HIP: "1"}),
        (OF_AMD, {HIP: "4,6"}, {HIP: "6"}),
        (OF_AMD, {SEEN: "4,6"}, {SEEN: "6"}),
        (OF_AMD, {HIP: "1,2", SEEN: "4,6"}, {HIP: "2"}),
        (OF_AMD, {HIP: "GPU-a,GPU-b"}, {HIP: "GPU-b"}),
        (OF_INTEL, {"ZE_AFFINITY_MASK": "0.0,0.1"}, {"ZE_AFFINITY_MASK": "0.1"}),
    ],
)
def test_a_worker_sees_its_own_device(monkeypatch, variables, given, shown):
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Accelerator, "variables", variables, raising=False)
    assert Accelerator().environment(1) == shown
    assert Platform().environment(1) == {}


def test_hardware_is_known_by_its_uuid_and_slices_by_their_name(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    properties = [SimpleNamespace(uuid=name) for name in "ab"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert [CUDA.hardware(number) for number in (0, 1)] == ["cuda a", "cuda b"]
    assert Platform().hardware(0) == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a process sees the first one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a, MIG-b")
    assert CUDA.count() == 2
    assert [CUDA.hardware(number) for number in (0, 1)] == ["MIG-a", "MIG-b"]
    assert CUDA.narrow(1) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    assert CUDA.hardware(0) == "MIG-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert CUDA.count() == 1
    assert CUDA.narrow(1) == 1


def test_the_kinds():
    assert list(PLATFORMS) == ["cpu", "cuda", "xpu"]
    assert [each.is_hardware for each in PLATFORMS.values()] == [False, True, True]
    xpu = PLATFORMS["xpu"]  # of which this build knows nothing
    assert (xpu.count(), xpu.is_built(), xpu.is_initialized()) == (0, False, False)
    # the watchdog of NCCL ends no worker
    assert CUDA.worker_settings["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert CUDA.worker_settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert Platform().worker_settings == {}


def test_every_thread_records_on_the_processs_own_device(monkeypatch):
    """The current device is one of each thread: 0 in a new one."""
    used = []
    streams = {1: "stream of device 1"}
    monkeypatch.setattr(CUDA, "owned", Owned(5, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr(torch.accelerator, "synchronize", used.append)
    event = SimpleNamespace(record=used.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    assert CUDA.record() is event
    CUDA.synchronize()
    assert used == ["stream of device 1", 1]


def test_a_host_value_goes_through_pinned_memory(monkeypatch):
    made, empty = [], torch.empty

    def noted(*args, pin_memory=False, **kwargs):  # this build cannot pin
        made.append((pin_memory, str(kwargs["device"])))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(CUDA, "upload", lambda tensor, device: tensor)
    value = torch.arange(6.0).reshape(2, 3).T
    with torch.device("meta"):
        placed = CUDA.place(value, torch.device("cpu"))
    assert made == [(True, "cpu")]
    assert placed.is_contiguous()
    kept = value.clone()
    value.zero_()
    assert placed.equal(kept)


def test_a_value_of_a_device_does_not_visit_the_host(monkeypatch):
    made, used, empty = [], [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(k) or empty(*a, **k))
    monkeypatch.setattr(torch, "get_device_module", lambda _: Streams([]))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, s: used.append(s.name))
    placed = CUDA.place(torch.empty(3, device="meta"), torch.device("meta"))
    assert placed.device.type == "meta"
    assert [each["device"].type for each in made[1:]] == ["meta"]
    assert used == ["main"]  # the caller may free the value before it is copied


def test_a_fetch_waits_for_no_later_call(monkeypatch):
    events = []

    @contextmanager
    def stream(chosen):
        events.append(("enter", chosen))
        yield
        events.append(("leave", chosen, target.tolist()))

    monkeypatch.setattr(CUDA, "owned", Owned(5, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda number: f"another stream of {number}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    target = torch.zeros(2)
    CUDA.fetch(torch.ones(2), target)
    assert events == [
        ("enter", "another stream of 1"),
        ("leave", "another stream of 1", [1.0, 1.0]),
    ]


def test_the_cpu_is_always_done():
    cpu = Platform()
    assert cpu.record().query()
    cpu.record().synchronize()
    cpu.synchronize()
    assert cpu.recover(ValueError())
    (result,) = cpu.launch(lambda xs: [xs[0] + 1], [torch.ones(2)], [((2,), torch.float32)])
    assert result.tolist() == [2, 2]


class Recorded:
    """Stands for the back end NCCL of a group."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def __getattr__(self, method):
        return lambda *args: self.calls.append((self.name, method, *args))


def of_backends(*backends):
    """Groups that have them."""
    return [SimpleNamespace(_get_backend=lambda _, one=one: one) for one in backends]


def fails(*_):
    raise RuntimeError("CUDA error: device-side assert triggered")


def test_communicators_are_aborted_together():
    """... also when the abort of one fails, or its device is lost, or it waits for another."""
    calls = []
    CUDA.abort(of_backends(Recorded(calls, "a"), Recorded(calls, "b")))
    assert sorted(calls) == [("a", "abort"), ("b", "abort")]
    calls.clear()
    CUDA.abort(of_backends(SimpleNamespace(abort=fails), Recorded(calls, "b")))
    assert calls == [("b", "abort")]
    CUDA.abort([SimpleNamespace(_get_backend=fails)])
    CUDA.abort([])
    both = threading.Barrier(2)
    backend = SimpleNamespace(abort=lambda: both.wait(10))
    CUDA.abort(of_backends(backend, backend))
    assert not both.broken


def test_communicators_connect_at_once(monkeypatch):
    calls = []
    nccl = Recorded(calls, "nccl")

    class Group:
        Options = staticmethod(lambda: SimpleNamespace(_timeout=None))

        def __new__(cls, store, rank, size, options):
            calls.append((rank, size, options._timeout))
            return nccl

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(CUDA, "owned", Owned(1, 1))
    assert CUDA.communicator(dist.HashStore(), 1, 4, "timeout") is nccl  # in a thread of its own
    device = torch.device("cuda", 1)
    assert calls == [(1, 4, "timeout"), ("nccl", "eager_connect_single_device", device)]


@pytest.mark.parametrize(("visible", "shown"), [(None, "0"), ("4,6", "4")])
def test_workers_share_a_device(monkeypatch, visible, shown):
    shared = SharedCuda()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert shared.environment(3) == {"CUDA_VISIBLE_DEVICES": shown}
    assert shared.device(3) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert shared.model(3) == "GPU 0"
    for gpus, count in ((0, 0), (1, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert shared.count() == count


@contextmanager
def groups_of_one(tmp_path, device="cpu", **settings):
    """The process groups of a process that is alone."""
    store = dist.FileStore(str(tmp_path / "store"), -1)
    config = Config(timeout=10.0, **settings)
    groups = process_groups.Groups(0, torch.device(device), store, config)
    try:
        yield groups
    finally:
        groups.drop()


def test_workers_that_share_a_device_talk_through_the_host(monkeypatch, tmp_path):
    monkeypatch.setitem(PLATFORMS, "cuda", SharedCuda())
    with groups_of_one(tmp_path, "cuda:0") as groups:
        groups.ensure("alone", ((0,),))
        group = group_named("alone")
        assert isinstance(group, ThroughHost)
        assert isinstance(group.group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)


class Streams:
    """Stands for ``torch.cuda``: work goes to the current stream."""

    def __init__(self, calls, current="main"):
        self.calls, self.current = calls, current
        self.made = 0

    def Stream(self, number):
        self.made += 1
        return Stream("copies", self.calls)

    def current_stream(self, number):
        return Stream(self.current, self.calls)

    def default_stream(self, number):
        return Stream("main", self.calls)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


@dataclass(frozen=True)
class Stream:
    name: str
    calls: list = field(compare=False)

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


class HostTensor:
    def __init__(self, streams, nbytes):
        self.streams, self.nbytes = streams, nbytes

    def is_pinned(self):
        return True

    def to(self, device, non_blocking):
        assert non_blocking
        self.streams.calls.append(f"{self.streams.current} copies")
        return self

    def record_stream(self, stream):
        self.streams.calls.append(f"kept for {stream.name}")


def test_large_copies_run_beside_the_kernels(monkeypatch):
    calls, platform = [], Cuda()
    streams = Streams(calls)
    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    platform.upload(HostTensor(streams, 8), torch.device("cuda"))
    assert calls == ["main copies"]
    for _ in range(2):
        calls.clear()
        platform.upload(HostTensor(streams, 1 << 20), torch.device("cuda"))
        assert calls == ["copies copies", "main waits for copies", "kept for main"]
    assert streams.made == 1


@pytest.mark.parametrize("current", ["main", "side"])
def test_work_of_all_streams_is_in_one_order(monkeypatch, current):
    calls = []
    streams = Streams(calls, current)
    monkeypatch.setattr(torch, "cuda", streams)
    with CUDA.own_stream():
        calls.append(f"{streams.current} computes")
    assert streams.current == current
    waits = ["main waits for side"] if current == "side" else []
    assert calls == [*waits, "main computes"]


def test_a_group_that_an_abort_has_missed_is_aborted(monkeypatch, tmp_path):
    aborted = []

    class Asynchronous(Platform):
        def abort(self, groups):
            aborted.extend(groups)

    monkeypatch.setitem(PLATFORMS, "cpu", Asynchronous())
    with groups_of_one(tmp_path, shared_memory=False) as groups:
        connect = groups._connected_group

        def slowly(*args):
            group = connect(*args)
            groups.abort(groups.epoch)
            return group

        monkeypatch.setattr(groups, "_connected_group", slowly)
        with pytest.raises(GroupLost):
            groups.ensure("alone", ((0,),))
        assert [group.size() for group in aborted] == [1]


def test_only_connections_of_gloo_tell_of_lost_peers(monkeypatch, tmp_path):
    ends = []

    class Chatting(Platform):
        def communicator(self, *_):  # NCCL closes connections that it does not need any more
            listener = socket.create_server(("127.0.0.1", 0))
            mine = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
            theirs.shutdown(socket.SHUT_RDWR)
            ends.extend([mine, theirs, listener])

    monkeypatch.setitem(PLATFORMS, "cpu", Chatting())
    with groups_of_one(tmp_path, shared_memory=False) as groups:
        groups.ensure("alone", ((0,),))
        assert ends
        assert not groups.lost_peers()
    for end in ends:
        end.close()


WATCHED = """
import sys, torch
touched = []
def touch(name):
    def probe(*args, **kwargs):
        touched.append(name)
        raise RuntimeError(name)
    return probe
for name in ("_lazy_init", "current_device", "get_rng_state", "synchronize", "set_device"):
    setattr(torch.cuda, name, touch(name))
torch.cuda.device_count = lambda: 1
if {}:
    torch.cuda.is_available = lambda: True
else:
    import importlib
    load = importlib.import_module
    def ask(*args, **kwargs):  # as Inductor does in torch 2.11, when it is imported
        torch._C._cuda_getDeviceCount = touch("getDeviceCount")
        torch.cuda.is_available()
        del torch._C._cuda_getDeviceCount
        return load(*args, **kwargs)
    importlib.import_module = ask
from torchpmap._runtime.local.preload import load_compiler, prepare
prepare()
load_compiler(compiles={})
print("touched", sorted(set(touched)), "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize("compiles", [False, True])
def test_the_fork_server_leaves_accelerators_alone(compiles):
    done = run_program("-c", WATCHED.replace("{}", str(compiles)), TORCHPMAP_WARM="1")
    # to compile would touch the device, which is why it is not done
    assert ("touched []" in done.stdout) is not compiles
    assert done.stdout.endswith(" True\n")


BROKEN = torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.fixture
def device(monkeypatch):
    """What is asked of a device; ``error``: what each use of it raises."""
    seen = SimpleNamespace(asked=[], error=None)

    def use(name):
        def using(*args, **kwargs):
            seen.asked.append((name, *args))
            if seen.error is not None:
                raise seen.error

        return using

    monkeypatch.setattr(torch.accelerator, "empty_cache", use("empty_cache"))
    monkeypatch.setattr(torch.accelerator, "synchronize", use("synchronize"))
    return seen


@pytest.mark.parametrize(
    ("error", "freed"),
    [(torch.OutOfMemoryError("CUDA out of memory"), True), (ValueError(), False)],
)
def test_only_what_lacks_memory_gives_cached_memory_back(device, error, freed):
    assert CUDA.recover(error)
    assert device.asked == [("empty_cache",)] * freed + [("synchronize", 0)]
    device.error = BROKEN  # a function may hide the error of a kernel behind its own
    assert not CUDA.recover(ValueError("mine"))
    assert not CUDA.recover(BROKEN)


@pytest.mark.parametrize("refusal", [0, 2])
def test_memory_is_pinned_where_it_can_be(monkeypatch, refusal):
    """CUDA keeps a refusal, and the next kernel would raise it: a small one takes it."""
    asked, kernels, zeros = [], [], torch.zeros

    def register(*args):
        asked.append(args)
        return refusal

    def launch(*size, device):
        kernels.append(str(device))
        raise torch.AcceleratorError("CUDA error: out of memory")

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=asked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", launch)
    CUDA.pin(4096, 8192)
    CUDA.unpin(4096)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert asked == [(4096, 8192, 0), 4096]
    assert kernels == (["cuda:0"] if refusal else [])


IN_USE = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchpmap._runtime.local.worker":
            from torchpmap._base.platform import Platform
            Platform.is_initialized = lambda self: True
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.long
def test_a_worker_does_not_use_a_device_that_was_used_before_the_fork(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(IN_USE)
    code = "import torch, torchpmap as tp; tp.pmap(lambda x: x + 1, compile=False)(torch.ones(2))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run_program("-c", code, fails=True, PYTHONPATH=path, TORCHPMAP_NUM_DEVICES="2")
    assert "cpu was initialised in the process that forks the workers" in done.stderr
    assert "Something that Python imports at its start does that" in done.stderr
