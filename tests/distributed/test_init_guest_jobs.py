"""A group of a communicator takes part in a program whose other ranks never hear of it."""

from __future__ import annotations

import pytest
from harness.launcher import job


@pytest.mark.parametrize("case", ["silent"])
def test_guest(case):
    done = job("guest", case, ranks=5, limit_s=90)
    assert done.rc == 0 and done.stdout.count("is through") == 5, done
