"""Printing from many ranks: what each has to say, in the order of ranks. Used by all examples.

Ranks that print by themselves print in any order, another one in every run. So rank 0 collects the texts and prints
them: then two runs show the same, and tests can compare.
"""

from __future__ import annotations

import sys

import mpiddp as dist


def print_in_order(text: object) -> None:
    """Print every rank's text, that of rank 0 first; every rank calls it."""
    texts = [""] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(str(text), texts, dst=0)
    if texts:
        print("\n".join(texts), flush=True)


def print_once(text: object = "") -> None:
    """Print the text of rank 0; what the others say is dropped."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def need_ranks(least: int, command: str) -> None:
    """End the program on all ranks, with one line, where it was started on fewer than ``least``."""
    if dist.get_world_size() >= least:
        return
    if dist.get_rank() == 0:
        print(f"this example needs at least {least} ranks: {command}", file=sys.stderr, flush=True)
    dist.barrier()  # a launcher ends all ranks when one has ended: rank 0 prints first
    sys.exit(2)
