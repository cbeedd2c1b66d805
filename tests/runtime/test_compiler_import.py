"""Covers: _runtime/local/forkserver.py, preload.py, plans.py, workers.py: which processes have the
compiler in memory, and when.
"""

import textwrap

import pytest
from _launched import HEAD, Program, script

SETUP = """
    tp.init(2, "cpu")
    rows = torch.arange(2.0)

    def has_compiler(x):
        return x * 0 + ("torch._inductor.compile_fx" in sys.modules)

    def ask():
        return tp.pmap(has_compiler, compile=False)(rows).tolist()
"""
COMPILES_NOTHING = """
assert tp.pmap(lambda x: x + 1, compile=EAGER)(rows).tolist() == [1, 2]
print(ask())
"""
COMPILES = """
assert tp.pmap(lambda x: x * 2)(rows).tolist() == [0, 2]
print(ask())
"""
MEETS_ONE = """
made = {}(lambda x: x * 2)
while ask() != [1, 1]:  # in the background: a call before it may be sent first
    pass
print(ask())
"""
REPLACES = """
def dies(x):
    if tp.axis_index("i") == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x

try:
    tp.pmap(dies, "i", compile=False)(rows).tolist()
except tp.WorkerDied:
    print("died")
print(ask())
"""
NONE, ALL = "[0.0, 0.0]", "[1.0, 1.0]"
BEGINS_WITH_ONE = "doubled = tp.pmap(lambda x: x * 2)\n" + COMPILES_NOTHING


def fresh(folder):
    """Code is made in a folder of its own, and g++ does not run for longer than the script."""
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return folder | {"TORCHPMAP_WARM": "1", "TORCHPMAP_SHARED_MEMORY": "0"}


def said(program):
    output = program.wait(150).clean()
    return [line for line in output.splitlines() if not line.startswith("torchpmap: waiting")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        # not for a graph that is not compiled; as soon as one is; and from then on at the start
        (COMPILES_NOTHING + COMPILES + REPLACES, [NONE, ALL, "died", ALL]),
        # workers that run: as soon as there is a function that is to be compiled, before its call
        (COMPILES_NOTHING + MEETS_ONE.format("tp.pmap"), [NONE, ALL]),
        (COMPILES_NOTHING + MEETS_ONE.format("tp.jit"), [NONE, ALL]),
        # at the start already if a function is to be compiled
        (BEGINS_WITH_ONE, [ALL]),
    ],
    ids=["compiles later", "meets a mapped function", "meets a jitted function", "is to compile"],
)
def test_workers_import_the_compiler_when_it_is_needed(code, printed, tmp_path):
    assert said(script(SETUP, code, **fresh(tmp_path))) == printed


@pytest.mark.long
def test_a_script_whose_code_was_saved_runs_without_the_compiler(tmp_path):
    """It is expected where a script has compiled nothing else when it last ran, and if that was
    wrong, workers import the compiler when they need it.
    """
    folder, file = tmp_path / "cache", tmp_path / "train.py"

    def run(code):
        file.write_text(f"{HEAD}{textwrap.dedent(SETUP)}{code}")
        return said(Program(str(file), **fresh(folder)))

    code = BEGINS_WITH_ONE + COMPILES
    assert [run(code) for _ in range(2)] == [[ALL, ALL], [NONE, NONE]]
    code += "# changed"
    assert run(code) == [ALL, ALL]
    for saved in folder.glob("torchpmap/*.py"):
        saved.unlink()
    assert run(code) == [NONE, ALL]


def test_what_tracing_needs_is_imported_while_the_workers_start():
    """The caller waits for them anyway."""
    told = "print('torch._dynamo' in sys.modules)"
    output = script(SETUP, told, "kept = tp.replicate(rows)", told).wait(100).clean()
    assert output.splitlines() == ["False", "True"]
