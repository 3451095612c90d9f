"""The public API is the one in ``api.txt``."""

from __future__ import annotations

import difflib

import api
from harness import launcher

RENEW = "The public API has changed. If that is meant: python -m tests.api --write, and commit tests/api.txt with it.\n"


def dumped(prelude: str = "") -> str:
    """Return the dump of a fresh interpreter, which must not start MPI for it; ``prelude`` runs first."""
    folder = str(api.FILE.parent)
    program = f"""
import sys
sys.path.append({folder!r})
{prelude}
import api
print(api.dump(), end="")
assert not {{"mpi4py.MPI", "cupy", "torch"}} & set(sys.modules), "the dump starts MPI or a GPU"
"""
    done = launcher.job(program)
    assert done.rc == 0, done
    return done.stdout


def difference(found: str) -> str:
    lines = difflib.unified_diff(api.FILE.read_text().splitlines(), found.splitlines(), "api.txt", "mpiddp", "", "", 0)
    return "\n".join(lines)


def test_public_api_is_the_one_of_the_file():
    found = difference(dumped())
    assert not found, RENEW + found


def test_dump_shows_what_was_changed():
    prelude = """
import mpiddp, mpiddp.nn
mpiddp.distributed.all_reduce = lambda tensor, op=None: None
mpiddp.distributed.__all__.remove("barrier")
mpiddp.nn.Linear.forward = lambda self, input, scale=1: input
mpiddp.nn.Module.extra = property(lambda self: 1)
"""
    found = difference(dumped(prelude)).splitlines()
    assert "+mpiddp.distributed.all_reduce(tensor, op=None)" in found
    assert "-mpiddp.distributed.barrier(group=None, async_op=False, device_ids=None, timeout=None)" in found
    assert "+mpiddp.nn.Linear.forward(self, input, scale=1)" in found
    assert "+mpiddp.nn.Module.extra is an attribute" in found
