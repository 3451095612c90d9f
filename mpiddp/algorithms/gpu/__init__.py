"""Collectives on CuPy arrays: by device pointers, pinned memory, CUDA IPC or NCCL. No GPU has run them yet."""
