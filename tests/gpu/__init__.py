"""What only a GPU can show: ``python -m tests.gpu`` runs all of it in one command and prints a table."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `harness`, when pytest has not found it already
