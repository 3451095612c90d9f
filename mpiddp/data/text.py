"""Text as a data set for a language model that reads bytes: windows of it, each with the bytes that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpiddp.typing import Array

VALIDATION_SHARE = 0.1
"""Of the text, at its end."""


class ByteWindows:
    """Windows of a text that lie one behind the other; the target of each byte is the next one.

    A data set that gives whole batches. A sample is a pair (inputs, targets) of int64 (window,), where ``targets`` is
    ``inputs`` one byte later.

    Parameters
    ----------
    tokens : ndarray
        uint8 (n,), such as a mapped file. What is left over behind the last whole window is not used.
    window : int
        Bytes a window.

    Raises
    ------
    ValueError
        If there is not one window, or ``tokens`` has more than one axis.

    Examples
    --------
    >>> data = ByteWindows(np.frombuffer(b"to be or", np.uint8), window=3)
    >>> len(data), bytes(data[1][0].tolist()), bytes(data[1][1].tolist())
    (2, b'be ', b'e o')
    """

    def __init__(self, tokens: Array, window: int) -> None:
        if tokens.ndim != 1 or window < 1 or len(tokens) <= window:
            raise ValueError(
                f"ByteWindows needs tokens (n,) and a window with 1 <= window < n, got shape {tokens.shape} and "
                f"window={window}"
            )
        self.tokens = tokens
        self.window = window
        # (windows, window + 1): a view, in which the last byte of a window is the first of the next one.
        self._rows = np.lib.stride_tricks.sliding_window_view(tokens, window + 1)[::window]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> tuple[Array, Array]:
        """Return the window at an integer, or those at a slice, a list or an array of integers."""
        rows = self._rows[index].astype(np.int64)
        return np.ascontiguousarray(rows[..., :-1]), np.ascontiguousarray(rows[..., 1:])

    def batch(self, indices: Array) -> tuple[Array, Array]:
        """Return inputs and targets of windows, int64 (len(indices), window) each."""
        return self[indices]


def map_text(path: str | Path) -> Array:
    """Map the bytes of a file, uint8 (n,).

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is empty.
    """
    path = Path(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: there is no text in it to learn from")
    return np.memmap(path, np.uint8, "r")


def split_text(tokens: Array, window: int) -> tuple[ByteWindows, ByteWindows]:
    """Return all but the last tenth of a text for training, and that tenth for validation.

    Raises
    ------
    ValueError
        If either has not one window; the text says how many bytes it takes.
    """
    cut = len(tokens) - round(VALIDATION_SHARE * len(tokens))
    if min(cut, len(tokens) - cut) <= window:
        raise ValueError(
            f"a text of {len(tokens):,} bytes is too short for windows of {window}: its last tenth, for validation, "
            f"has to be longer than one, so take {10 * (window + 1):,} bytes or more, or a shorter window"
        )
    return ByteWindows(tokens[:cut], window), ByteWindows(tokens[cut:], window)


def text(path: str | Path, window: int = 64) -> tuple[ByteWindows, ByteWindows]:
    """Return the bytes of a file as training and validation data; the file is mapped, and read as it is used.

    Parameters
    ----------
    path : path
        Any file.
    window : int, default 64
        Bytes a sample.

    Returns
    -------
    tuple of ByteWindows
        All but the last tenth, and that tenth.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such file, or it is too short.
    """
    return split_text(map_text(path), window)


__all__ = ["ByteWindows", "map_text", "split_text", "text"]
