"""Covers: checkpoint.py and the modules _checkpoint_*: in the background, interrupted, damaged, and
under torchrun.
"""

import contextlib
import gc
import os
import resource
import shutil
import signal
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _launched import launch, run_program
from _support import EAGER, in_threads, worker_pids
from _values import WHOLE, rows, sign, table_of

import torchpmap as tp
from torchpmap.checkpoint import _folder, _load, _save, latest, load, save
from torchpmap.checkpoint._save import begin

pytestmark = pytest.mark.usefixtures("four_devices")
HERE = Path(__file__).parent


# -- asynchronous ----------------------------------------------------------------------------------


def test_values_may_change_while_they_are_saved(tmp_path):
    host, array, given = torch.ones(3), np.ones(3), rows(WHOLE[:4])
    saving = save(tmp_path / "c", {"a": host, "b": array, "c": given}, asynchronous=True)
    host.zero_()
    array[:] = 0
    tp.pmap(lambda x: x * 0, donate_argnums=0, compile=EAGER)(given).block_until_ready()
    assert given.is_deleted()
    assert saving.wait() is None
    assert saving.done()
    assert repr(saving) == f"<Saving {tmp_path / 'c'}: complete>"
    found = load(tmp_path / "c")
    assert found["a"].tolist() == found["b"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(found["c"], WHOLE[:4])


def test_values_are_free_while_they_are_saved(tmp_path):
    """Else a donated value would stay on the devices until it is on disk."""
    host, given = torch.ones(3), rows(WHOLE[:4])
    finish = begin(tmp_path / "c", {"a": host, "c": given})
    gone = [weakref.ref(host), weakref.ref(given)]
    del host, given
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    finish()
    assert torch.equal(load(tmp_path / "c")["c"], WHOLE[:4])


def test_readers_wait_for_a_save_in_progress(tmp_path):
    save(tmp_path / "step_1", {"w": rows(WHOLE[:4])}, asynchronous=True)
    assert latest(tmp_path) == tmp_path / "step_1"
    save(tmp_path / "step_1", {"w": rows(WHOLE[4:])}, asynchronous=True)
    assert torch.equal(load(tmp_path / "step_1")["w"], WHOLE[4:])


def test_several_threads_save(tmp_path):
    trees = [{"w": rows(WHOLE[:4] + k), "k": k} for k in range(3)]
    in_threads(3, lambda k: [save(tmp_path / name, trees[k]) for name in (f"of_{k}", "of_all") * 3])
    for k in range(3):
        assert torch.equal(load(tmp_path / f"of_{k}")["w"], WHOLE[:4] + k)
    found = load(tmp_path / "of_all")
    assert torch.equal(found["w"], WHOLE[:4] + found["k"])


@contextmanager
def files_are_limited_to(num_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = r"could not be saved: OSError: \[Errno 27\] File too large. What was there before is still"


def test_an_error_in_the_background_is_raised_by_wait(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(3)})
    with files_are_limited_to(100):
        saving = save(tmp_path / "c", {"w": torch.zeros(3)}, asynchronous=True)
        with pytest.raises(tp.CheckpointError, match=FULL):
            saving.wait()
    assert repr(saving).endswith("failed>")
    assert os.listdir(tmp_path) == ["c"]
    assert load(tmp_path / "c")["w"].tolist() == [1.0, 1.0, 1.0]
    save(tmp_path / "c", {"w": torch.zeros(3)})  # it is not raised twice


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path):
    with files_are_limited_to(100):
        saving = save(tmp_path / "c", {"w": torch.zeros(3)}, asynchronous=True)
        saving._thread.join()
    with pytest.raises(tp.CheckpointError, match=FULL) as raised:
        save(tmp_path / "d", {"w": torch.zeros(3)})
    assert raised.value.__notes__ == ["in an asynchronous save before this one"]
    save(tmp_path / "d", {"w": torch.zeros(3)})
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.long
def test_an_error_that_no_call_raises_is_printed_at_the_end(tmp_path):
    code = """
import resource, sys, torch, torchpmap as tp
resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
tp.checkpoint.save(sys.argv[1], {"w": torch.zeros(3)}, asynchronous=True)
"""
    done = run_program("-c", code, str(tmp_path / "c"), TORCHPMAP_RUNTIME="inline")
    assert f"torchpmap: the checkpoint {tmp_path}/c could not be saved: OSError" in done.stderr


def limit_of_files(num_bytes: int) -> None:
    """On device 1."""

    def limit(x):
        if int(tp.axis_index("i")) == 1:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        return x

    tp.pmap(limit, axis_name="i", compile=False)(torch.zeros(4))


def test_one_device_cannot_write(tmp_path):
    tp.shutdown()  # the store of the workers' process groups is a file too: it has to be short
    tp.init(4)
    save(tmp_path / "c", {"w": rows(WHOLE[:4])})
    large = rows(torch.ones(4, 1500))
    limit_of_files(4000)
    try:
        with pytest.raises(tp.CheckpointError, match=FULL):
            save(tmp_path / "c", {"w": large})
    finally:
        limit_of_files(-1)
    assert os.listdir(tmp_path) == ["c"]
    assert torch.equal(load(tmp_path / "c")["w"], WHOLE[:4])


def test_a_worker_is_killed_while_it_writes(tmp_path):
    save(tmp_path / "c", {"w": rows(torch.zeros(4))})
    large = rows(torch.ones(4, 4_000_000))
    pids = worker_pids()
    saving = save(tmp_path / "c", {"w": large}, asynchronous=True)
    os.kill(pids[2], signal.SIGKILL)
    try:
        saving.wait()
    except tp.CheckpointError as error:  # unless it was done already
        assert "the worker that writes rank_2.safetensors has ended" in str(error)  # noqa: PT017
        expected = [0.0] * 4
    else:
        expected = torch.ones(4, 4_000_000).tolist()
    with contextlib.suppress(tp.WorkerDied):  # a call that comes before the pool has noticed
        worker_pids()
    assert load(tmp_path / "c")["w"].tolist() == expected
    assert os.listdir(tmp_path) == ["c"]
    assert len(worker_pids()) == 4  # after the repair


def test_an_error_before_anything_is_written_is_raised_as_it_is(tmp_path, monkeypatch):
    save(tmp_path / "c", 1)
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        save(tmp_path / "c", {"w": rows(WHOLE[:4])})
    assert os.listdir(tmp_path) == ["c"]
    assert load(tmp_path / "c") == 1


def test_an_interrupt_before_anything_is_written_leaves_nothing(tmp_path, monkeypatch):
    def interrupted() -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.util.get_temp_dir", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "c", {"w": rows(WHOLE[:4])})
    assert os.listdir(tmp_path) == []
    save(tmp_path / "c", 1)
    assert load(tmp_path / "c") == 1


# -- never half of one -----------------------------------------------------------------------------


@pytest.mark.long
def test_killed_at_any_moment(tmp_path):
    script = str(HERE / "_checkpoint_kills.py")
    done = run_program(script, str(tmp_path), TORCHPMAP_RUNTIME="inline")
    assert int(done.stdout.split()[0]) > 10


SECOND = """
import sys, torchpmap as tp
try:
    tp.checkpoint.save(sys.argv[1], 3)
except tp.CheckpointError as error:
    print(error)
"""


def test_a_second_process_that_saves_to_the_folder_is_refused(tmp_path):
    save(tmp_path / "c", 1)
    finish = begin(tmp_path / "c", 2)
    for _ in range(2):
        told = run_program("-c", SECOND, str(tmp_path / "c"), TORCHPMAP_RUNTIME="inline").stdout
        assert f"another process saves to {tmp_path}/c. Wait until it is done" in told
    assert load(tmp_path / "c") == 1
    finish()
    assert load(tmp_path / "c") == 2
    run_program("-c", SECOND, str(tmp_path / "c"), TORCHPMAP_RUNTIME="inline")
    assert load(tmp_path / "c") == 3
    assert os.listdir(tmp_path) == ["c"]


def test_a_save_replaces_one_of_its_process_that_has_not_ended(tmp_path):
    """As that of a signal handler does, in which the handler's must succeed."""
    finish = begin(tmp_path / "c", {"w": rows(WHOLE[:4])})
    save(tmp_path / "c", 2)
    with pytest.raises(tp.CheckpointError, match="could not be saved"):
        finish()
    assert load(tmp_path / "c") == 2
    assert os.listdir(tmp_path) == ["c"]


def test_a_save_in_a_handler_leaves_the_save_that_it_interrupts_whole(tmp_path, monkeypatch):
    run_on, calls = _save.run_on, []

    def interrupted(*args):
        told = run_on(*args)
        calls.append(args)
        if len(calls) == 1:  # the workers have copied, and do not write yet
            save(tmp_path / "other", {"w": rows(WHOLE[4:])})
        return told

    monkeypatch.setattr(_save, "run_on", interrupted)
    save(tmp_path / "c", {"w": rows(WHOLE[:4])})
    assert torch.equal(load(tmp_path / "c")["w"], WHOLE[:4])
    assert torch.equal(load(tmp_path / "other")["w"], WHOLE[4:])


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    finish = begin(tmp_path / "c", 1)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ours, 1)
        os._exit(0)
    finish()
    told = run_program("-c", SECOND, str(tmp_path / "c"), TORCHPMAP_RUNTIME="inline").stdout
    os.write(theirs, b"x")
    os.waitpid(child, 0)
    os.close(ours)
    os.close(theirs)
    assert told == ""
    assert load(tmp_path / "c") == 3


def test_between_the_renames_the_old_one_is_found(tmp_path):
    save(tmp_path / "step_1", {"step": 1})
    (tmp_path / "step_1").rename(tmp_path / ".step_1.replaced")
    assert load(tmp_path / "step_1") == {"step": 1}
    assert latest(tmp_path) == tmp_path / "step_1"
    save(tmp_path / "step_1", {"step": 2})
    assert load(tmp_path / "step_1") == {"step": 2}
    assert os.listdir(tmp_path) == ["step_1"]


def test_one_that_is_replaced_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    restore = _load._restore

    def late(*args):
        save(tmp_path / "c", {"step": torch.ones(3)})
        return restore(*args)

    save(tmp_path / "c", {"step": torch.zeros(3)})
    monkeypatch.setattr(_load, "_restore", late)
    with pytest.raises(tp.CheckpointError, match="was replaced or removed while it was read"):
        load(tmp_path / "c")


# -- damage ----------------------------------------------------------------------------------------


def flip(name: str, at: float):
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[int(at * len(data))] ^= 4
        (path / name).write_bytes(data)

    return damage


def cut(name: str):
    return lambda path: os.truncate(path / name, 10)


def remove(name: str):
    return lambda path: (path / name).unlink()


DAMAGES = [
    (flip("rank_1.safetensors", 0.99), r"bytes \d+ to \d+ of rank_1.safetensors have changed"),
    (flip("host.safetensors", 0.99), r"bytes \d+ to \d+ of host.safetensors have changed since"),
    (flip("host.safetensors", 0.5), r"the header of host.safetensors has changed since it was wri"),
    (cut("rank_1.safetensors"), r"rank_1.safetensors has 10 bytes, but \d+ were written"),
    (remove("rank_2.safetensors"), r"the file 'rank_2.safetensors' is missing"),
    (cut("torchpmap.json"), r"'torchpmap.json' is not what was written"),
    (flip("torchpmap.json", 0.5), r"'?torchpmap.json'? (has changed|is not what was written)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[m[:50] for _, m in DAMAGES])
def test_damage(tmp_path, damage, message):
    tree = {"w": rows(WHOLE[:4]), "host": torch.ones(5)}
    save(tmp_path / "step_1", tree)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_2")
    damage(tmp_path / "step_2")
    expected = rf"(?s)the checkpoint {tmp_path}/step_2 is damaged: {message}.*Load an earlier"
    for like in (None, tree):
        with pytest.raises(tp.CheckpointError, match=expected):
            load(tmp_path / "step_2", like)
    assert torch.equal(tree["w"].to_host(), WHOLE[:4])  # the pool is as it was
    assert torch.equal(load(tmp_path / "step_1", tree)["w"].to_host(), WHOLE[:4])


def test_another_version(tmp_path):
    """It is not damaged, so ``latest`` does not pass over it: training would begin again."""
    for step in (1, 2):
        save(tmp_path / f"step_{step}", step)
    of_2 = {"version": 2, "tree": {"dict": [["w", "w"]]}, "files": {}}  # keys for leaves
    for table in ({**table_of(tmp_path / "step_2"), "version": 4}, of_2):
        sign(tmp_path / "step_2", table)
        message = rf"is in version {table['version']} .*Use the one that wrote it"
        for read in (load, lambda path: latest(path.parent)):
            with pytest.raises(tp.CheckpointError, match=message):
                read(tmp_path / "step_2")


def saved_by_torch(folder, *, is_ours):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    if is_ours:  # as torchpmap 0.1 wrote it
        sign(folder, {"version": 1, "tree": {"dict": [["w", "w"]]}, "files": {}})


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_format_of_before(tmp_path, is_ours):
    saved_by_torch(tmp_path / "step_1", is_ours=is_ours)
    ours = r"of torchpmap 0.1, .* If it is yours, convert it: python -m torchpmap convert \S+ NEW"
    torchs = "of torch.distributed.checkpoint. .* dcp_to_torch"
    message = f"is in the format {ours if is_ours else torchs}"
    for read in (load, lambda path: latest(path.parent)):
        with pytest.raises(tp.CheckpointError, match=message):
            read(tmp_path / "step_1")
    if not is_ours:
        with pytest.raises(FileExistsError, match="exists and is no checkpoint"):
            save(tmp_path / "step_1", 1)


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*/none: nothing has this name"):
        load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"it has no torchpmap.json. Give the folder that"):
        load(tmp_path)


# -- latest ----------------------------------------------------------------------------------------


def test_latest_goes_by_number(tmp_path):
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None
    for name in ("step_9", "step_10", "best", "5"):
        save(tmp_path / name, 1)
    (tmp_path / "step_11").mkdir()
    (tmp_path / "notes_12").write_text("")
    (tmp_path / ".step_13.saving").mkdir()
    assert latest(tmp_path) == tmp_path / "step_10"


def test_latest_passes_over_what_is_damaged(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"step_{step}", {"w": rows(WHOLE[:4])})
    (tmp_path / "step_2" / "rank_3.safetensors").unlink()
    missing = r"passes over step_2: .* the file 'rank_3.safetensors' is missing"
    with pytest.warns(UserWarning, match=missing):
        assert latest(tmp_path) == tmp_path / "step_1"


@pytest.mark.parametrize(
    ("place", "name"), [(_load.Table, "of"), (_folder, "opened")], ids=["before", "amid"]
)
def test_latest_finds_one_that_is_replaced_while_it_looks(tmp_path, monkeypatch, place, name):
    for step in (1, 2):
        save(tmp_path / f"step_{step}", 1)
    read = getattr(place, name)

    def late(*given):
        monkeypatch.undo()
        (tmp_path / "step_2").rename(tmp_path / ".step_2.replaced")
        return read(*given)

    monkeypatch.setattr(place, name, late)
    assert latest(tmp_path) == tmp_path / "step_2"


# -- torchrun --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_controllers(tmp_path):
    tree = {"rows": rows(WHOLE[:2].reshape(4, 2)), "shared": tp.replicate(torch.arange(1.0, 4.0))}
    save(tmp_path / "local", {**tree, "step": 5, "copies": torch.tensor([5.0, 6.0])})
    done = launch(2, str(HERE / "_torchrun_checkpoint.py"), str(tmp_path))
    assert done.code == 0, done.output
    assert done.output.count("passed test_") == 7, done.output
    like = {
        "rows": rows(torch.zeros(4, 2)),
        "columns": tp.pmap(lambda x: x, in_axes=1, out_axes=1, compile=EAGER)(
            torch.zeros(3, 4, dtype=torch.int64)
        ),
        "shared": tp.replicate(torch.zeros(3)),
        "spread": torch.zeros(6, dtype=torch.bfloat16),
        "own": torch.tensor(0.0),
        "host": np.zeros(3, np.int64),
        "step": 0,
    }
    found = load(tmp_path / "both", like)
    assert found["rows"].sharding == like["rows"].sharding
    assert found["rows"].tolist() == torch.arange(8.0).reshape(4, 2).tolist()
    assert found["columns"].tolist() == torch.arange(12).reshape(3, 4).tolist()
    assert found["shared"].tolist() == [2.0, 2.0, 2.0]
    assert found["spread"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (found["own"].item(), found["host"].tolist(), found["step"]) == (3.0, [0, 1, 2], 7)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_elastic_restart(tmp_path):
    """Rank 1 is killed at step 8 and the job resumes at 6; the losses are those of a whole run."""
    options = ("--standalone", "--max-restarts=2")
    done = launch(2, str(HERE / "_torchrun_elastic.py"), str(tmp_path), options=options)
    assert done.code == 0, done.output
    first, second, whole = (
        (tmp_path / name).read_text().splitlines()
        for name in ("attempt_0", "attempt_1", "uninterrupted")
    )
    assert (first[0], second[0], whole[0]) == ("start 0", "start 6", "start 0")
    assert not (tmp_path / "attempt_2").exists()
    assert len(whole) == 11
    assert first[1:] == whole[1:9]  # the steps 0 to 7
    assert second[1:] == whole[7:]  # 6 to 9, from step 6 on bit by bit
