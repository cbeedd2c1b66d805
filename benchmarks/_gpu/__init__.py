"""The sections of ``benchmarks/gpu.py``, one per file."""
