"""The tiers of the suite: at every change a test of each promise; ``--long`` adds other cases, marked as ``long``.

A test of tests/mpi runs on the numbers of a ``ranks`` mark, else on 1 to 4 if marked as ``core``, else on 2 and 3;
files about the same on any number, on one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

CORE, REST = (1, 2, 3, 4), (2, 3)
"""Numbers of ranks of core tests, and of others."""

ONE_NUMBER = {
    "test_bench.py": 2,
    "test_data_training.py": 3,
    "test_device_training.py": 2,
    "test_local_sgd.py": 3,
    "test_names.py": 2,
    "test_nccl.py": 3,
    "test_training_batchnorm.py": 2,
    "test_training_reproducibility.py": 3,
    "test_training_local.py": 3,
    "test_training_models.py": 3,
    "test_training_options.py": 2,
    "test_training_resume.py": 3,
    "test_training_sanity_check.py": 3,
    "test_training_shards.py": 3,
    "test_training_skips.py": 3,
    "test_training_windows.py": 3,
}
"""Files of tests/mpi on options, files and texts, the same on any number of ranks."""


def numbers(file: str, marks: dict[str, list[int]], long: bool) -> list[int]:
    if long:
        return list(CORE)
    if marks.get("ranks"):
        return sorted(marks["ranks"])
    if "core" in marks:
        return list(CORE)
    return [ONE_NUMBER[file]] if file in ONE_NUMBER else list(REST)


def thinned(cases: Iterable[Any], *everyday: Any) -> list[Any]:
    """Return the values of a parameter: ``everyday``, and the others for the long tier."""
    cases = list(cases)
    missing = set(everyday) - set(cases)
    assert not missing, f"no such cases: {missing}"
    return [pytest.param(case, marks=() if case in everyday else pytest.mark.long) for case in cases]


def chosen(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Return a parameter's values in the tests of this file that will run."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return {call.params[parameter] for call in calls if call is not None and parameter in call.params}
