"""Collectives on CuPy arrays. No GPU has run them yet."""
