"""Tags of the algorithms' messages.

Operations in flight share a communicator, and tags keep their messages apart. Among messages of one tag, a receive
matches in the order of submission, which is the same on all ranks.
"""

import enum


class Tag(enum.IntEnum):
    BLOCK = 1
    """A block of gather, scatter or all_to_all."""
    LONG_BLOCK = 2
    """A long block in a group with eager buffers, if its receiver cannot read it by cross-memory attach."""
    RING = 3
    TREE = 4
    NODES = 5
    HANDSHAKE = 6
    DEVICE_RING = 7
    """The tag of the first of several concurrent rings or lanes on a device. The tags of the others follow it."""
