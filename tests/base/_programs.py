"""Programs of their own."""

import os
import subprocess
import sys


def run_program(
    code: str, *options: str, fails: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a program printed; it must succeed, or fail."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done
