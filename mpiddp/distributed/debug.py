"""``MPIDDP_DEBUG=INFO``: every operation is logged."""

import logging

from mpiddp.faults import this_job
from mpiddp.mpi import recorder
from mpiddp.mpi.operation import Operation

logger = logging.getLogger("mpiddp")

on = False
"""True if operations are logged. If they are not, a call reads only this flag."""


def configure(level: str) -> None:
    global on
    on = level == "INFO"
    if on:
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def log(operation: Operation) -> None:
    job = this_job.current()
    logger.info("[rank %d] %s, called at %s", 0 if job is None else job.world.rank, operation, recorder.line(operation))
