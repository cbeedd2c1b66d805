"""Covers: _runtime/torchrun/launcher.py: what each launcher says in its variables, as one place."""

from __future__ import annotations

import re

import pytest

from torchpmap._runtime.torchrun.launcher import DEFAULT_PORT, JobPlace, found_place

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


def test_no_launcher():
    assert found_place({}) is None
    assert found_place({"PATH": "/bin", "WORLD_SIZE": "2"}) is None
    assert found_place({"RANK": "0"}) is None


def test_torchrun():
    assert found_place(TORCHRUN) == JobPlace(3, 4, 1, 2, "node0", 1234, "torchrun")


def test_what_torch_distributed_reads_is_what_torchrun_said():
    place = found_place(TORCHRUN)
    assert place is not None
    assert place.environment() == TORCHRUN


def test_only_rank_and_size_mean_one_host():
    place = found_place({"RANK": "1", "WORLD_SIZE": "2"})
    assert place == JobPlace(1, 2, 1, 2, "127.0.0.1", DEFAULT_PORT, "torchrun")


def test_srun():
    assert found_place(SRUN) == JobPlace(5, 8, 1, 4, "gpu07", DEFAULT_PORT, "srun")


@pytest.mark.parametrize(("node", "count"), [("0", 2), ("1", 2), ("2", 3)])
def test_tasks_on_each_node_of_srun(node, count):
    variables = {"SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": node}
    place = found_place({**SRUN, **variables})
    assert place is not None
    assert place.local_size == count


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],cpu3", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack2-n[001-128]", "rack2-n001"),
    ],
)
def test_first_host_of_srun(nodes, first):
    place = found_place({**SRUN, "SLURM_STEP_NODELIST": nodes})
    assert place is not None
    assert place.host == first


def test_master_addr_goes_before_the_list_of_nodes():
    place = found_place({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"})
    assert place is not None
    assert (place.host, place.port) == ("10.0.0.1", 77)


def test_a_batch_script_is_no_process_of_several():
    assert found_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


def test_an_interactive_shell_of_slurm_is_no_process_of_several():
    assert found_place({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_inside_srun_is_torchrun():
    place = found_place({**SRUN, **TORCHRUN})
    assert place is not None
    assert (place.launcher, place.rank, place.size) == ("torchrun", 3, 4)


def test_open_mpi():
    assert found_place(OPEN_MPI) == JobPlace(1, 2, 1, 2, "127.0.0.1", DEFAULT_PORT, "mpirun")


def test_hydra_on_two_hosts():
    place = found_place({**HYDRA, "MASTER_ADDR": "node0"})
    assert place == JobPlace(1, 2, 0, 1, "node0", DEFAULT_PORT, "mpiexec")


def test_several_hosts_without_the_address_of_the_first():
    text = (
        "mpiexec started 2 processes on several hosts, but nothing says where rank 0 is. Set "
        "MASTER_ADDR to its host name (and MASTER_PORT to a free port)."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        found_place(HYDRA)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"RANK": "x"},
            "the variables that torchrun sets say rank 'x' of '4', local rank '1', but ",
        ),
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
