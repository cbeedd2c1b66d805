"""Covers: which modules read pickles at all, and so run what is in them (see docs/security.md)."""

import ast

from test_layers import SOURCES

OWN_PROCESSES = "bytes that a process of the same pool has sent through a socket pair"
RUNS = {
    "_doctor.convert": "a checkpoint that the user has named, by torch.load(weights_only=True)",
    "_base.errors": OWN_PROCESSES,
    "_runtime.local.monitor": OWN_PROCESSES,
    "_runtime.local.plans": OWN_PROCESSES,
    "_runtime.local.runtime": OWN_PROCESSES,
    "_runtime.local.preload": OWN_PROCESSES,
    "_runtime.local.worker": OWN_PROCESSES,
    "_trace.graph_code": "a text that it has written itself: names and literals",
    "_trace.saved_code": "files of the folder whose libraries Inductor runs unchecked",
    "_runtime.torchrun.runtime": "bytes that this process has pickled itself: a copy of a function",
}
"""Every module that unpickles or runs texts: whose."""
READERS = {"load", "loads", "Unpickler", "_Unpickler"}
RUNNERS = {"eval", "exec", "compile", "__import__"}


def readers(name: str) -> set[str]:
    """What a module calls, or derives from, that reads pickles or runs texts."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("pickle", "cloudpickle", "torch", "marshal", "shelve"):
                found |= {node.attr} & READERS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & RUNNERS
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "cloudpickle"):
            found |= {alias.name for alias in node.names} & READERS
    return found


def test_nothing_else_reads_pickles_or_runs_texts():
    assert {name for name in SOURCES if readers(name)} == set(RUNS)


def test_checkpoints_have_no_pickles():
    """Files of other users, also of recorded calls, are JSON and raw bytes."""
    ours = ("checkpoint", "debug._record_file", "debug._graph_data")
    checkpoint = [SOURCES[name].read_text() for name in SOURCES if name.startswith(ours)]
    nodes = [node for text in checkpoint for node in ast.walk(ast.parse(text))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "json" in names
    assert not names & {"pickle", "cloudpickle", "marshal", "shelve", "zipfile", "torch.storage"}
    assert not [name for name in names if name.startswith("torch.distributed")]
    assert not {ast.unparse(node) for node in nodes} & {"torch.load", "torch.save"}
