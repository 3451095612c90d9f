"""Checks that need a GPU: ``python -m tests.gpu`` runs all of them in one command and prints a table.

With pytest, the tests of this folder run the sections that are right or wrong, and skip where there is no GPU.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `harness`, when pytest has not found it already
