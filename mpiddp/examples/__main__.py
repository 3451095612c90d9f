"""``python -m mpiddp.examples``: the list of examples."""

from __future__ import annotations

from mpiddp import examples
from mpiddp.examples.printing import print_once

if __name__ == "__main__":
    assert examples.__doc__ is not None
    print_once(examples.__doc__.strip().replace("``", ""))
