"""The BLAS threads of a run that is to be resumed: they decide how sums are formed, and are set before NumPy is loaded.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path


def resumed_threads(output: Path, ranks: int) -> int | None:
    """Return how many BLAS threads each rank had when the newest checkpoint of a run was written.

    Parameters
    ----------
    output : Path
        The run's folder.
    ranks : int
        How many there are now. With another number the bits are others anyway.

    Returns
    -------
    int or None
        None where there is no checkpoint, or it is of another number of ranks, or of a run that set no threads.
    """
    for state in sorted(output.glob("checkpoints/step-*/state.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            bits = json.loads(state.read_text())["bits"]
            threads = bits["BLAS threads"]
            return int(threads) if bits["ranks"] == ranks and threads is not None else None
    return None
