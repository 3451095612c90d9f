"""Benchmarks of mpiddp beside plain MPI, one copy of the bytes, and Gloo: ``python -m mpiddp bench`` and ``plot``.

Modules are imported on first use; `cli` needs no NumPy.
"""
