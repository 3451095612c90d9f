"""Messages that cannot arrive."""

from functools import partial

import pytest
from harness.launcher import job, side_by_side
from harness.tiers import chosen, thinned

# Of programs/waits: what rank 1 does, what rank 0 does, and the texts.
MESSAGES = {
    ("recv from 0", "send of 0 with tag 1"): [
        *("recv of float64 (4,) from rank 0 with tag 0", "ended and not sent it", "with tag 1 (32 bytes of float64)"),
    ],
    ("recv from 2", "send of 0"): [
        *("from rank 2 with tag 0", "program of rank 2 has ended"),
        "a message lies that no receive has taken: from rank 0",
    ],
    ("irecv from 0", ""): ["irecv of", "from rank 0", "not sent it"],
    ("", "long send of 0"): ["send of float64 (200000,) to rank 1 with tag 0", "not received it"],
}

EVERYDAY = (("recv from 0", "send of 0 with tag 1"), ("", "long send of 0"))


@pytest.fixture(scope="module")
def jobs(request):
    calls = {case: partial(job, "waits", *case, ranks=3, limit_s=50) for case in chosen(request, "case")}
    with side_by_side(calls) as futures:
        yield futures


@pytest.mark.parametrize("case", thinned(MESSAGES, *EVERYDAY), ids="; ".join)
def test_a_message_that_cannot_arrive(jobs, case):
    done = jobs[case].result()
    assert done.rc not in (0, 124) and "the same operations in the same order" not in done.stderr, done
    for text in MESSAGES[case]:
        assert text in done.stderr, (text, done)
