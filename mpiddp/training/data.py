"""Training and test data of ``--data``: one copy on each node."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mpiddp.data import ArrayDataset, Dataset, digits, labelled, mnist, open_labelled, shared_on_node, synthetic
from mpiddp.errors import MismatchError

from .config import Config
from .options import UsageError
from .ranks import gathered, raise_on_all_ranks
from .user_code import call

Split = tuple[Dataset, Dataset]


def load_data(config: Config) -> Split:
    """Return training and test data; UsageError, on every rank, if they are absent or of unequal numbers."""
    train, test = raise_on_all_ranks(lambda: _load(config))
    lengths = gathered((len(train), len(test)))
    for rank, found in enumerate(lengths):
        if found != lengths[0]:
            raise UsageError(
                f"--data {config.data} gave {lengths[0]} samples (for training and for the test) on rank 0, and {found}"
                f" on rank {rank}: it has to give all of them on every rank, each of which takes its share"
            )
    if 0 in lengths[0]:
        raise UsageError(
            f"--data {config.data} gave {lengths[0]} samples (for training and for the test): at least one of each is"
            " needed"
        )
    return train, test


def _load(config: Config) -> Split:
    kind, _, place = config.data.partition(":")
    try:
        match kind:
            case "digits":
                return _shared(lambda train: digits(train, seed=config.seed))
            case "synthetic":
                return _shared(lambda train: synthetic(4096 if train else 1024, seed=config.seed, train=train, noise=2))
            case "mnist":
                return _shared(functools.partial(mnist, config.data_dir or ""))  # Config has checked that there is one
            case "npz":
                return labelled(shared_on_node(lambda: open_labelled(place)), config.seed)
        # Called on every rank, so that it may use `shared_on_node`.
        train, test = (call("--data", config.data, Dataset, train=part) for part in (True, False))
        return train, test
    except (OSError, ValueError, MismatchError) as error:
        raise UsageError(" ".join([f"--data {config.data}: {error}", *getattr(error, "__notes__", ())])) from error


def _shared(make: Callable[[bool], ArrayDataset]) -> Split:
    arrays = shared_on_node(lambda: [*make(True).arrays, *make(False).arrays])
    return ArrayDataset(*arrays[:2]), ArrayDataset(*arrays[2:])
