"""``randperm``: the order of an epoch, ``torch.randperm`` without torch, bit for bit."""

import numpy as np
import numpy.typing as npt

MAX_LENGTH = (2**32 - 1) // 20
"""torch shuffles sequences of this length or more by another algorithm."""


def randperm(n: int, seed: int) -> npt.NDArray[np.int64]:
    """Return ``torch.randperm(n, generator=torch.Generator().manual_seed(seed))``, int64 (n,), on every machine.

    ``n`` is at most 214,748,363; the lower 32 bits of ``seed`` count, as in torch.

    Notes
    -----
    torch swaps element ``i`` with a random element ``j[i] >= i`` (Durstenfeld, Algorithm 235, Comm. ACM 7, 1964). Step
    ``i`` moves the element at ``j[i]`` to ``i``: the last earlier step with the same ``j`` left it there, or it is
    ``j[i]`` itself. In exchange the step leaves ``W[i]`` at ``j[i]``, the element that was at ``i``. The last earlier
    step whose ``j`` is ``i``, called ``parent[i]``, left that element there, or it is ``i`` itself. So
    ``W[i] = W[parent[i]]`` in a forest about ``log n`` deep, which pointer jumping (Wyllie 1979) resolves in a few
    whole-array operations.

    Examples
    --------
    >>> randperm(6, seed=0).tolist()
    [2, 5, 3, 0, 1, 4]
    """
    if not 0 <= n < MAX_LENGTH:
        raise ValueError(f"randperm needs a length n with 0 <= n < {MAX_LENGTH}, got {n}")
    steps = np.arange(n)
    words = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 2**32, size=n, dtype=np.uint32)
    partner = steps + words % (n - steps)

    # Sort the steps by partner, then by time. Sorting packed integers is several times faster than an argsort.
    packed = np.sort(partner << 32 | steps)
    by_partner = packed & 0xFFFFFFFF
    same = (packed[1:] >> 32) == (packed[:-1] >> 32)
    previous = np.full(n, -1)  # for each step the last earlier step with the same partner, or -1
    previous[by_partner[1:][same]] = by_partner[:-1][same]

    parent = steps.copy()  # for each step the last earlier step whose partner is this step, or the step itself
    last = np.append(~same, True)[:n]
    parent[packed[last] >> 32] = by_partner[last]
    alone = partner == steps  # such a step is itself the last with its partner; its parent is the one before it
    parent[alone] = np.where(previous[alone] < 0, steps[alone], previous[alone])
    while not np.array_equal(left := parent[parent], parent):
        parent = left
    return np.where(previous < 0, partner, parent[previous])
