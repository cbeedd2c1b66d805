"""Covers: _runtime/torchrun/place.py: what each launcher says in its variables, as one place."""

import re

import pytest

from torchpmap._runtime.torchrun.place import DEFAULT_PORT, JobPlace, found_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"}
HERE = ("127.0.0.1", DEFAULT_PORT)

PLACES = {
    "no launcher": ({}, None),
    "no rank": ({"PATH": "/bin", "WORLD_SIZE": "2"}, None),
    "no size": ({"RANK": "0"}, None),
    "torchrun": (TORCHRUN, JobPlace(3, 4, 1, 2, "node0", 1234, "torchrun")),
    "only rank and size: one host": (
        {"RANK": "1", "WORLD_SIZE": "2"}, JobPlace(1, 2, 1, 2, *HERE, "torchrun")),
    "srun": (SRUN, JobPlace(5, 8, 1, 4, "gpu07", DEFAULT_PORT, "srun")),
    "an address goes before the list of nodes": (
        {**SRUN, **ADDRESS}, JobPlace(5, 8, 1, 4, "10.0.0.1", 77, "srun")),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
    "an interactive shell of slurm": (
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "torchrun inside srun": (
        {**SRUN, **TORCHRUN}, JobPlace(3, 4, 1, 2, "node0", 1234, "torchrun")),
    "open mpi": (OPEN_MPI, JobPlace(1, 2, 1, 2, *HERE, "mpirun")),
    "hydra on two hosts": (
        {**HYDRA, "MASTER_ADDR": "node0"}, JobPlace(1, 2, 0, 1, "node0", DEFAULT_PORT, "mpiexec")),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "place"), PLACES.values(), ids=PLACES)
def test_place(variables, place):
    assert found_place(variables) == place


def test_what_torch_distributed_reads_is_what_torchrun_said():
    assert found_place(TORCHRUN).environment() == TORCHRUN


TASKS = "2(x2),3"


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": TASKS, "SLURM_NODEID": "0"}, "local_size", 2),
        ({"SLURM_STEP_TASKS_PER_NODE": TASKS, "SLURM_NODEID": "1"}, "local_size", 2),
        ({"SLURM_STEP_TASKS_PER_NODE": TASKS, "SLURM_NODEID": "2"}, "local_size", 3),
        ({"SLURM_STEP_NODELIST": "node1"}, "host", "node1"),
        ({"SLURM_STEP_NODELIST": "node1,node2"}, "host", "node1"),
        ({"SLURM_STEP_NODELIST": "gpu[07-09,12],cpu3"}, "host", "gpu07"),
        ({"SLURM_STEP_NODELIST": "gpu[3,5]"}, "host", "gpu3"),
        ({"SLURM_STEP_NODELIST": "rack2-n[001-128]"}, "host", "rack2-n001"),
    ],
)
def test_tasks_and_first_host_of_srun(change, name, value):
    assert getattr(found_place({**SRUN, **change}), name) == value


def test_several_hosts_without_the_address_of_the_first():
    text = (
        "mpiexec started 2 processes on several hosts, but nothing says where rank 0 is. Set "
        "MASTER_ADDR to its host name (and MASTER_PORT to a free port)."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        found_place(HYDRA)


SAY = "the variables that torchrun sets say"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "x"}, f"{SAY} rank 'x' of '4', local rank '1', but "),
        ({"LOCAL_WORLD_SIZE": "two"}, "these must be whole numbers: invalid literal for int()"),
        ({"MASTER_PORT": "http"}, "these must be whole numbers: invalid literal for int()"),
        ({"RANK": ""}, "say rank '' of '4'"),
        ({"RANK": "4"}, "say rank 4 of 4, local rank 1 of 2, but a rank is below its count."),
        ({"RANK": "-1"}, "say rank -1 of 4, local rank 1 of 2, but a rank is below its count."),
        ({"LOCAL_RANK": "2"}, "say rank 3 of 4, local rank 2 of 2, but a rank is below its count."),
    ],
)
def test_bad_values(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        found_place({**TORCHRUN, **change})
