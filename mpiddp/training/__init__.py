"""Training as a job, the command ``python -m mpiddp train``: configuration, models, metrics, checkpoints.

`config` is read before NumPy, because BLAS reads its number of threads then; so nothing is imported here.
"""

from mpiddp import moved

moved.explain(__name__)
