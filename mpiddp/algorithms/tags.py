"""Tags of the algorithms' messages: operations in flight share a communicator.

A receive without a tag would match any operation's message; with its kind's tag it matches in the order of submission,
equal on all ranks.
"""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """The kind of a message."""

    BLOCK = 1
    """Of gather, scatter or all_to_all."""
    RING = 2
    TREE = 3
    NODES = 4
    """A piece that crosses from node to node."""
    DEVICE_RING = 5
    """The first of several concurrent rings on device arrays; the last tag, as theirs follow."""
