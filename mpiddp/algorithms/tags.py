"""Tags of the algorithms' messages on a group's communicators.

Operations in flight share a communicator: one may post receives at submission while another probes later. A receive
without a tag would match any of their messages; with its own it matches its kind, in the order of submission on all
ranks.
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
