"""Random faults at random moments, seeded; ``soak.py`` runs the same for long."""

import pytest
from _chaos import Chaos

import torchpmap as tp

FAULTS = 12


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_sweep(seed, capfd):
    tp.shutdown()
    tp.init(4)
    chaos = Chaos(seed)
    chaos.good_round()
    for _ in range(FAULTS):
        chaos.faulty_round()
    tp.shutdown()
