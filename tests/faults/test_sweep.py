"""Random faults at random moments, seeded; ``soak.py`` runs the same for long."""

import pytest
from _chaos import Chaos
from _support import TEST_ALL

import torchpmap as tp

FAULTS = 12


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not TEST_ALL, reason="minutes: TORCHPMAP_TEST_ALL=1 runs it, as soak.py does")
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
