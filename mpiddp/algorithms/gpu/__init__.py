"""Collectives on CuPy arrays."""
