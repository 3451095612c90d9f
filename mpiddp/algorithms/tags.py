"""Tags of the algorithms' messages: operations in flight share a communicator.

With its kind's tag a receive matches in the order of submission, equal on all ranks.
"""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    BLOCK = 1
    """Of gather, scatter or all_to_all."""
    LONG_BLOCK = 6
    """The same, where a shorter one would go through eager buffers."""
    RING = 2
    TREE = 3
    NODES = 4
    DEVICE_RING = 5
    """First of several concurrent rings, whose tags follow."""
