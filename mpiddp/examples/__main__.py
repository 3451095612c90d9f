"""``python -m mpiddp.examples``: the list of examples."""

from __future__ import annotations

from mpiddp import examples

if __name__ == "__main__":
    print(examples.__doc__.strip())
