"""Files that other processes read at any moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, or replace it: whole, or not at all."""
    draft = path.with_name(f".{path.name[:40]}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # after an error, or Ctrl-C
