"""Programs that measure, and ones that draw trials for as long as one likes: ``python -m tests.measure.NAME``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `harness`, when pytest has not found it already
