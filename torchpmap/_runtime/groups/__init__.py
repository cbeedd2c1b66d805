"""Process groups: shared memory, Gloo or NCCL."""
