"""Printing from many ranks. Used by all examples.

Ranks that print by themselves print in any order. Here rank 0 collects the texts and prints them: two runs show the
same, and tests can compare.
"""

from __future__ import annotations

import sys

import mpiddp as dist
from mpiddp import settings


def on_first_rank() -> bool:
    """Return True on rank 0, and in a program that no launcher has started."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    launched = settings.launch()
    return launched is None or launched.rank == 0


def print_in_order(text: object) -> None:
    """Print every rank's text, that of rank 0 first. Collective."""
    texts = [""] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(str(text), texts, dst=0)
    if texts:
        print("\n".join(texts), flush=True)


def print_once(text: object = "") -> None:
    """Print the text of rank 0."""
    if on_first_rank():
        print(text, flush=True)


def need_ranks(least: int, command: str) -> None:
    """End the program with one line if it was started on fewer than ``least`` ranks."""
    if dist.get_world_size() >= least:
        return
    if dist.get_rank() == 0:
        print(f"this example needs at least {least} ranks: {command}", file=sys.stderr, flush=True)
    dist.barrier()  # a launcher ends all ranks with the first: rank 0 prints before
    sys.exit(2)
