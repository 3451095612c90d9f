"""The measurement of recoveries, small: no kill ends a run."""

from __future__ import annotations

import numpy as np
import pytest
from harness import hosts
from harness.launcher import is_open_mpi

from measure import recovery

pytestmark = pytest.mark.long


@pytest.mark.parametrize("host_count", [1, 2])
@pytest.mark.parametrize("way", recovery.WAYS)
def test_training_goes_on_after_kills(way, host_count):
    if way != "restart" and not is_open_mpi():
        pytest.skip("only Open MPI's mpirun lets ranks live on")
    if host_count > 1 and hosts.why_not() is not None:
        pytest.skip(str(hosts.why_not()))
    row = recovery.measure(way, 3, host_count, 2, np.random.default_rng(host_count))
    assert not row.lost, row.lost[0]
    assert len(row.seconds) == 2 and max(row.repeated) <= (11 if way == "restart" else 1), row
