"""Training and test data of ``--data``: one copy on each node."""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.data import ArrayDataset, Dataset, digits, labelled, mnist, open_labelled, shared_on_node, synthetic
from mpiddp.errors import MismatchError

from .config import Config, UsageError
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
    kind, colon, place = config.data.partition(":")
    try:
        if not colon:
            return _MADE[kind](config)
        if kind == "npz":
            return labelled(shared_on_node(lambda: open_labelled(place)), config.seed)
        return _called(config.data)
    except IsADirectoryError as error:
        raise UsageError(f"--data {config.data}: {error.filename} is a folder, where a file is wanted") from error
    except (OSError, ValueError, MismatchError) as error:
        raise UsageError(" ".join([f"--data {config.data}: {error}", *getattr(error, "__notes__", ())])) from error


def _digits(config: Config) -> Split:
    return _shared(lambda train: digits(train, seed=config.seed))


def _synthetic(config: Config) -> Split:
    return _shared(lambda train: synthetic(4096 if train else 1024, seed=config.seed, train=train, noise=2.0))


def _mnist(config: Config) -> Split:
    folder = config.data_dir
    assert folder is not None, "Config has checked it"
    return _shared(lambda train: mnist(folder, train))


_MADE = {"digits": _digits, "synthetic": _synthetic, "mnist": _mnist}


def _called(name: str) -> Split:
    """Call the user's function on every rank, so that it may use `shared_on_node`."""
    train, test = (call("--data", name, train=part) for part in (True, False))
    for part in (train, test):
        if not isinstance(part, Dataset):
            raise UsageError(
                f"--data {name}: expected data sets, which have __len__ and __getitem__, from train=True and "
                f"train=False, got {type(part).__name__}"
            )
    return train, test


def _shared(make: Callable[[bool], ArrayDataset]) -> Split:
    arrays = shared_on_node(lambda: [*make(True).arrays, *make(False).arrays])
    return ArrayDataset(*arrays[:2]), ArrayDataset(*arrays[2:])
