"""Which parameters share a bucket: pure arithmetic on sizes, the same on every rank.

Gradients become ready from the last layer to the first. A bucket leaves when its last gradient is there, so a large
bucket saves messages and a small one leaves early; the one that closes last has nothing left to hide behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MIB = 1 << 20
DEFAULT_CAP_BYTES = 25 * MIB
LAST_CAP_BYTES = 1 * MIB
"""Cap of the bucket that closes last: torch makes the one that leaves first small, which hides no communication."""

LEAST_BYTES = MIB // 4
"""What is left for the bucket that closes first joins the next one, where it is less than this: in each bucket ranks
wait for each other twice, which took longer than what so little could hide (784-256-256-10: 10 KB of 1 MB)."""


def _fill(order: Sequence[int], sizes_bytes: Sequence[int], caps_bytes: Sequence[int]) -> list[list[int]]:
    """Fill buckets in ``order``; a bucket closes when it reaches its cap, so the parameter that crosses it is in."""
    buckets: list[list[int]] = []
    filled, cap = 0, 0
    for index in order:
        if filled >= cap:
            cap = caps_bytes[min(len(buckets), len(caps_bytes) - 1)]
            filled = 0
            buckets.append([])
        buckets[-1].append(index)
        filled += sizes_bytes[index]
    return buckets


def plan(
    order: Sequence[int],
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    caps_bytes: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the buckets, each a list of parameters, in the order in which they will be complete.

    Parameters
    ----------
    order : sequence of int
        The parameters in the order in which their gradients are expected.
    sizes_bytes : sequence of int
        Size of each parameter.
    kinds : sequence
        Dtype (and device) of each parameter; kinds never share a bucket.
    caps_bytes : sequence of int, optional
        Caps of the first, second, ... bucket of each kind, the last one for all that follow. By default 25 MiB, and
        1 MiB for the bucket that closes last; less than 256 KiB make no bucket of their own.

    Examples
    --------
    >>> plan([3, 2, 1, 0], [4, 4, 4, 4], "aaaa", caps_bytes=[8])
    [[3, 2], [1, 0]]
    """
    buckets: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        mine = [index for index in order if kinds[index] == kind]
        if caps_bytes is not None:
            buckets += _fill(mine, sizes_bytes, caps_bytes)
        else:
            from_behind = _fill(mine[::-1], sizes_bytes, [LAST_CAP_BYTES, DEFAULT_CAP_BYTES])
            if len(from_behind) > 1 and sum(sizes_bytes[index] for index in from_behind[-1]) < LEAST_BYTES:
                from_behind[-2:] = [from_behind[-2] + from_behind[-1]]
            buckets += [bucket[::-1] for bucket in from_behind[::-1]]
    place = {index: position for position, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


def caps_in_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> list[int] | None:
    """Return the caps that a program gives in MiB, as one number or one for each bucket, or None without any.

    Raises
    ------
    ValueError
        If both are given, or a cap is not positive.
    """
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError("give bucket_cap_mb or bucket_cap_mb_list, not both")
    caps = [bucket_cap_mb] if bucket_cap_mb is not None else bucket_cap_mb_list
    if caps is None:
        return None
    if not caps or min(caps) <= 0:
        raise ValueError(f"bucket caps must be positive numbers of MiB, got {list(caps)}")
    return [int(cap * MIB) for cap in caps]
