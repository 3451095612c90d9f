"""Output of examples: rank 0 prints the texts of all ranks in one order, so that two runs show the same."""

import mpiddp as dist
from mpiddp import launchers


def on_first_rank() -> bool:
    """Return True on the launcher's rank 0, and in a program that no launcher has started."""
    launched = launchers.launch()
    return launched is None or launched.rank == 0


def print_in_order(text: object) -> None:
    """Print every rank's text in rank order. All ranks call this."""
    texts = [""] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(str(text), texts, dst=0)
    if texts:
        print("\n".join(texts), flush=True)


def print_once(text: object = "") -> None:
    if on_first_rank():
        print(text, flush=True)
