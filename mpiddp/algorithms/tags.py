"""Tags of the algorithms' messages, because operations in flight share a communicator.

Among messages of one tag, a receive matches in the order of submission, which is the same on all ranks.
"""

import enum


class Tag(enum.IntEnum):
    BLOCK = 1
    """A block of gather, scatter or all_to_all."""
    LONG_BLOCK = 2
    """A block that does not go through the eager buffers of its group, because it is too long."""
    RING = 3
    TREE = 4
    NODES = 5
    HANDSHAKE = 6
    DEVICE_RING = 7
    """The tag of the first of several concurrent rings. The tags of the other rings follow it."""
