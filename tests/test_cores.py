"""BLAS threads: the share of the cores, unless the user has said a number."""

import os

import pytest

from mpiddp import cores

pytestmark = pytest.mark.usefixtures("environ")


@pytest.mark.parametrize(
    ("mine", "launchers", "ranks", "expected"),
    [
        (16, 16, 4, 4),  # one mask for all: divided
        (16, 16, 5, 3),
        (2, 2, 4, 1),  # more ranks than cores
        (4, 16, 4, 4),  # each rank has its own cores
        (1, 16, 16, 1),
        (8, 16, 4, 4),  # two ranks have one half
        (8, 8, 1, 8),
    ],
)
def test_limit_blas_threads(environ, mine, launchers, ranks, expected):
    environ.setattr(os, "sched_getaffinity", lambda pid: set(range(launchers if pid else mine)))
    environ.setenv("PMI_RANK", "0")
    environ.setenv("PMI_SIZE", str(2 * ranks))
    environ.setenv("MPI_LOCALNRANKS", str(ranks))
    assert cores.limit_blas_threads() == expected
    assert {os.environ[name] for name in cores.THREAD_VARIABLES} == {str(expected)}
    assert cores.blas_threads() == expected
    assert cores.limit_blas_threads() is None


def test_limit_blas_threads_without_launcher(environ):
    environ.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert cores.limit_blas_threads(7) == 7 == cores.blas_threads()
    for name in cores.THREAD_VARIABLES:
        environ.delenv(name)
    assert cores.limit_blas_threads() == 6


@pytest.mark.parametrize("name", cores.THREAD_VARIABLES)
def test_limit_blas_threads_leaves_the_users_choice_alone(environ, name):
    environ.setenv(name, "3")
    assert cores.limit_blas_threads() is None
    assert [os.environ.get(each) for each in cores.THREAD_VARIABLES].count(None) == 2
