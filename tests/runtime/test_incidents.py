"""Covers: _runtime/local/incidents.py. No process is started: incidents are noted, values asked
about.
"""

import gc

import pytest

import torchpmap as tp
from torchpmap._base.devices import enumerate_devices
from torchpmap._base.errors import pack_exception
from torchpmap._runtime.local.incidents import Incidents
from torchpmap._runtime.local.supervise import Exited, Failed, Verdict

DEVICES = enumerate_devices(3, "cpu")
ALL = (0, 1, 2)


def failure(seq: int, text: str = "mine") -> Failed:
    return Failed(0, seq, False, pack_exception(ValueError(text)), "on device cpu:0")


def death(rank: int) -> Exited:
    return Exited(rank, -9, 100 + rank)


def verdict(*events: Failed | Exited) -> Verdict:
    failures = tuple(e for e in events if isinstance(e, Failed))
    return Verdict(failures, tuple(e for e in events if isinstance(e, Exited)))


# events, what the dead had completed, (seq, ranks) asked about, the answer
CASES = {
    "before the failure": ([failure(7)], {}, (6, ALL), None),
    "of the failure": ([failure(7)], {}, (7, ALL), ValueError),
    "behind the failure": ([failure(7)], {}, (9, (1, 2)), ValueError),
    "complete, on a dead rank": ([death(1)], {1: 5}, (5, ALL), tp.ShardLost),
    "complete, on another rank": ([death(1)], {1: 5}, (5, (0, 2)), None),
    "not answered by the dead rank": ([death(1)], {1: 5}, (6, ALL), tp.WorkerDied),
    "sent later, to other ranks": ([death(1)], {1: 5}, (6, (0, 2)), None),
    "a failure and a death": ([failure(7), death(1)], {1: 5}, (7, (0, 2)), ValueError),
    "older than both": ([failure(7), death(1)], {1: 5}, (3, ALL), tp.ShardLost),
}


@pytest.mark.parametrize(("events", "completed", "asked", "error"), CASES.values(), ids=CASES)
def test_what_an_incident_costs(events, completed, asked, error):
    incidents = Incidents(DEVICES)
    era = incidents.era
    incidents.note(verdict(*events), completed)
    found = incidents.of_value(era, *asked)
    assert type(found) is (error or type(None))
    assert incidents.of_value(incidents.era, 100, ALL) is None


def test_an_incident_concerns_the_values_made_before_its_repair():
    """A value is lost by the first death of its rank."""
    deaths, failures = Incidents(DEVICES), Incidents(DEVICES)
    eras = []
    for seq in (5, 10, 15):
        eras.append((deaths.era, failures.era, seq))
        deaths.note(Verdict((), (Exited(1, -9, seq),)), {1: 100})
        failures.note(verdict(failure(seq, f"of {seq}")), {})
    for of_deaths, of_failures, seq in eras:
        assert f"pid {seq}" in str(deaths.of_value(of_deaths, 1, ALL))
        assert str(failures.of_value(of_failures, seq, ALL)) == f"of {seq}"
        assert failures.of_value(of_failures, seq - 1, ALL) is None
        assert str(failures.of_command(of_failures, seq)) == f"of {seq}"
        assert failures.of_command(of_failures, seq + 1) is None


def test_an_incident_is_forgotten_with_the_last_value_that_it_concerns():
    incidents = Incidents(DEVICES)
    kept = incidents.era
    incidents.note(verdict(death(1)), {1: 5})
    for seq in range(1000):
        incidents.note(verdict(failure(seq)), {})
    gc.collect()
    assert incidents.lossy == {id(kept)}
    assert isinstance(incidents.of_value(kept, 1, ALL), tp.ShardLost)
    del kept
    assert not incidents.lossy
