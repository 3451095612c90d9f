from __future__ import annotations

import pytest
from harness.launcher import job


@pytest.mark.once
def test_no_cure_loses_the_result():
    done = job("cures", ranks=2)
    assert done.rc == 0, done
    assert done.stdout.count("make y = numpy.ascontiguousarray(x), pass y, and copy the result back: x[...] = y") == 2
    assert done.stdout.count("make y = numpy.array(x), pass y and read the result from y") == 2, done
    assert done.stdout.count("; pass numpy.ascontiguousarray(x)") == 2, done
