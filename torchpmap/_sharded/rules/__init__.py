"""Which torch operations work block by block, and where their results live."""
