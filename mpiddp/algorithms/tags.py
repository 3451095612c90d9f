"""Tags of the messages that algorithms send on a group's communicators.

Operations in flight share a communicator, and one may post its receives when it is submitted where another one probes
for its messages later. A receive without a tag would match a message of any of them; with a tag of its own it matches
those of its kind only, and these arrive in the order in which all ranks submit their operations.
"""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """The kind of a message."""

    BLOCK = 1
    """A block of gather, scatter or all_to_all."""
    RING = 2
    TREE = 3
    NODES = 4
    """A piece that crosses from node to node."""
    DEVICE_RING = 5
    """The first of several rings on device arrays, which run concurrently; the last tag, as theirs follow."""
