"""Random programs (``_random_jit.py``) on values in random layouts, beside plain torch."""

import pytest
from _random_jit import AROUND, WAYS, failure, made
from _support import mostly_long

pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize("seed", mostly_long(range(10), 0))
@pytest.mark.parametrize("ways", [WAYS, list(AROUND)], ids=["in jit", "around jit"])
def test_random_programs(ways, seed):
    for number in range(20):
        program = made(f"{seed}:{number}", ways[number % len(ways)])
        wrong = failure(program)
        assert wrong is None, (program, wrong)
