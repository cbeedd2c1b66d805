"""Rows 23 to 25 of the matrix: the controller ends or forks.  See docs/faults.md."""

import signal
import threading

import pytest
import torch
from _launched import script
from _rig import EAGER, N, note_time, total, within
from _support import SCALE, in_threads, mostly_long

import torchpmap as tp

SETUP = """
    tp.init(num_devices=2)
    total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
    x = torch.arange(2.)
    kept = total(x).block_until_ready()
    workers = pids()
"""
BUSY = """
    def step(x):
        {}
        return tp.psum(x, "i")
    threading.Thread(target=lambda: tp.pmap(step, "i", compile=False)(x), daemon=True).start()
    time.sleep(0.2)
"""
WORKERS = {
    "idle": "",
    "in a collective": BUSY.format("int(tp.axis_index('i')) == 1 and time.sleep(1000)"),
    "in Python": BUSY.format("exec('while True: pass')"),
    "interpreter locked": BUSY.format("__import__('ctypes').PyDLL(None).sleep(1000)"),
    "parents of children": """
        import multiprocessing
        def has_a_child(x):
            multiprocessing.Process(target=time.sleep, args=(1000,)).start()
            return x
        tp.pmap(has_a_child, compile=False)(x)
    """,
    "stopped": """
        os.kill(workers[1], signal.SIGSTOP)
    """,
    "full sockets": """
        os.kill(workers[1], signal.SIGSTOP)
        def ahead():
            z = kept
            while True:
                z = total(z)
        threading.Thread(target=ahead, daemon=True).start()
        time.sleep(1)
    """,
}
SHUTDOWN = "start = time.perf_counter(); tp.shutdown(); print('took', time.perf_counter() - start)"
ENDS = {
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "os._exit": ("os._exit(3)", 3),
    "end of the program": ("", 0),
    "shutdown": (SHUTDOWN, 0),
}


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("workers", WORKERS)
def test_row_23_the_controller_ends(workers, end):
    """However it ends and whatever the workers do, nothing is left after 2 s."""
    last, code = ENDS[end]
    ended = script(SETUP, WORKERS[workers], last).wait(40, patience=2)
    note_time(ended.seconds, 2)
    output = ended.clean(code)
    if end == "shutdown":
        words = output.split()  # the thread that is told of the end may print that after the time
        seconds = float(words[words.index("took") + 1])
        assert seconds < 5 * SCALE
        note_time(seconds, 5)


ORPHANS = """
    from torchpmap._runtime.local.forkserver import server
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        signal.pause()
    print(child, flush=True)
    os.kill(workers[0], signal.SIGSTOP)
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_row_23_a_killed_controller_leaves_only_a_child_that_it_forked():
    """Also when processes of ours are stopped."""
    quiet = "import warnings; warnings.simplefilter('ignore')"
    ended = script(quiet, SETUP, ORPHANS).wait(40)
    assert ended.code == -signal.SIGKILL, ended.output
    assert ended.left == [int(ended.output)]
    assert not ended.files


TO_ALL = """
    import multiprocessing
    from torchpmap._runtime.local.forkserver import server
    told, forks = [], server.pid
    signal.signal(signal.{0}, lambda *_: told.append(1))
    for pid in (os.getpid(), forks, *workers):
        os.kill(pid, signal.{0})
    print(len(told), kept.tolist(), total(kept).tolist(), pids() == workers)
    def with_children(x):
        child = multiprocessing.Process(target=time.sleep, args=(1000,))
        child.start()
        os.kill(child.pid, signal.{0})
        child.join()
        program = subprocess.Popen(["sleep", "1000"])
        program.send_signal(signal.{0})
        return x - child.exitcode + program.wait()
    print(tp.pmap(with_children, compile=False)(x).tolist())
    assert server._process.poll() is None
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_a_scheduler_sends_to_all_processes(name):
    """The controller's handler can still use what the devices hold.  Their children obey it."""
    ended = script("import subprocess", SETUP, TO_ALL.format(name)).wait(60, patience=10)
    assert ended.clean() == "1 [1.0, 1.0] [2.0, 2.0] True\n[0.0, 1.0]\n"


FORMS = {
    "no shutdown": "print(total(x).tolist())",
    "a call is pending": "total(x)",
    "the pool is dropped": "import gc; del kept; gc.collect()",
    "a thread makes calls": """
        def calls():
            for _ in range(300):
                total(x)
        threading.Thread(target=calls, daemon=True).start()
    """,
    "an exception ends the program": "total(x); raise SystemExit(7)",
    "a failed call": """
        def fails(x):
            raise ValueError
        try:
            tp.pmap(fails, compile=False)(x)
        except ValueError:
            pass
    """,
    "a worker just died": "os.kill(workers[0], signal.SIGKILL)",
    "forked": """
        if os.fork() == 0:
            try:
                total(x)
            except tp.RuntimeClosed:
                os._exit(0)
            os._exit(1)
        assert os.wait()[1] == 0
        assert total(x).tolist() == [1.0, 1.0]
    """,
}


@pytest.mark.parametrize("form", mostly_long(FORMS, "a worker just died"))
def test_row_24_the_program_ends(form):
    quiet = "import warnings; warnings.simplefilter('ignore')"
    ended = script(quiet, SETUP, FORMS[form]).wait(30, patience=3)
    note_time(ended.seconds, 3)
    output = ended.clean(7 if form == "an exception ends the program" else 0)
    assert output == ("[1.0, 1.0]\n" if form == "no shutdown" else "")


@pytest.mark.usefixtures("pool")
def test_row_25_eight_threads():
    """They call the same function, and each its own."""
    barrier = threading.Barrier(8)

    def work(k):
        own = tp.pmap(lambda x: tp.pmax(x, "i") * k, "i", compile=EAGER if k % 2 else False)
        barrier.wait(30)
        for step in range(15):
            x = torch.tensor([float(step), 1000.0 * k, 0.0, 0.0])
            y = total(x)
            assert own(x).tolist() == [max(step, 1000.0 * k) * k] * N
            assert y.tolist() == [step + 1000.0 * k] * N
            assert float(total(y)[1]) == N * (step + 1000.0 * k)

    assert within(5, lambda: in_threads(8, work)).error is None
