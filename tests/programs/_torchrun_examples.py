"""Programs in ``examples/`` in every rank of a job, one after the other (see test_examples.py).

    torchrun --standalone --nproc-per-node=2 _torchrun_examples.py FOLDER

FOLDER/commands.json names the programs and their arguments.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from _examples import run_here
from _launched import host, run_cases
from _support import EAGER


def digits() -> Any:
    """What the function of an example gives, beside what the program prints."""
    import data_parallel_digits

    params, history, accuracy = data_parallel_digits.train(epochs=1, compile=EAGER)
    return host(params), history.loss, accuracy


if __name__ == "__main__":
    commands = json.loads((Path(sys.argv[1]) / "commands.json").read_text())
    programs = {name: functools.partial(run_here, *command) for name, command in commands.items()}
    run_cases({**programs, "digits": digits}, sys.argv[1])
