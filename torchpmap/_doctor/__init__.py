"""``python -m torchpmap``: what this machine is, whether it works, and how fast it is."""
