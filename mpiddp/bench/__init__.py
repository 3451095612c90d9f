"""Benchmarks of mpiddp against plain MPI, memcpy and Gloo: ``python -m mpiddp bench`` and ``python -m mpiddp plot``.

The command imports a benchmark's module only when it runs that benchmark, so that `cli` needs no NumPy.
"""
