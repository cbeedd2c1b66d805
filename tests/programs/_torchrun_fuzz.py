"""Programs of the fuzzer in every rank of a job (see test_fuzz.py).

    torchrun --standalone --nproc-per-node=2 _torchrun_fuzz.py FOLDER SEED...

Each rank passes the rows that are its own, and the parts of the results are put together.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from _fuzz_generate import generate
from _fuzz_modes import run
from _launched import Raised, run_cases
from _torchrun_parity import Unfit, local_pmap

import torchpmap as tp


def case(seed: str) -> Any:
    names = {**vars(tp), "pmap": local_pmap}
    try:
        return run(generate(seed), "launched", SimpleNamespace(**names))
    except Unfit as unfit:
        return Raised("Unfit", str(unfit))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases({seed: lambda seed=seed: case(seed) for seed in sys.argv[2:]}, sys.argv[1])
