"""Training as a job, the command ``python -m mpiddp train``: configuration, models, metrics, checkpoints.

The command reads `config` before it imports NumPy, because BLAS reads its number of threads at that import. Therefore
the package itself imports no module that needs NumPy.
"""

from mpiddp import moved

moved.explain(__name__)
