"""Random programs (``_random_jit.py``) on values in random layouts, beside plain torch."""

import pytest
from _random_jit import failure, made
from _support import mostly_long

pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize("seed", mostly_long(range(10), 0))
def test_random_programs(seed):
    for number in range(20):
        program = made(f"{seed}:{number}")
        wrong = failure(program)
        assert wrong is None, (program, wrong)
