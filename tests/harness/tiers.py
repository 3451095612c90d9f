"""The tiers of the suite: at every change a test of each promise; ``--long`` adds other cases, marked as ``long``.

A test marked as ``mpi`` runs on the numbers of its ``ranks`` mark, else on 1 to 4 if it is marked as ``core``, else on
3: an odd number of ranks, of which one is neither the first nor the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

CORE, REST = (1, 2, 3, 4), (3,)
"""Numbers of ranks of core tests, and of others."""


def numbers(test: pytest.Item, long: bool) -> tuple[int, ...]:
    for mark in test.iter_markers():  # the closest one first
        if mark.name == "ranks" and not long:
            return mark.args
        if mark.name == "core":
            return CORE
    return CORE if long else REST


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
