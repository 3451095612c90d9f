"""``tests.measure.soak`` for a moment: random programs of two threads give right results and leave nothing behind."""

from pathlib import Path

import pytest
from harness import launcher

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("minutes", ["0.05", pytest.param("1", marks=pytest.mark.long)])
def test_soak(ranks, minutes):
    shared = set(launcher.SHARED.iterdir())
    soak = ("-m", "tests.measure.soak", "--minutes", minutes)
    done = launcher.job(*soak, ranks=ranks, search=[ROOT], limit_s=240, cwd=ROOT)
    assert done.rc == 0 and "no wrong result" in done.stdout, done
    assert not [path for path in set(launcher.SHARED.iterdir()) - shared if path.name.startswith("mpiddp")]
