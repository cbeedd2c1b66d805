"""What every layer uses: errors, settings, devices, pytrees, and torch's internals."""
