"""``shared_on_node``: one copy on each node, loaded by one rank there; all ranks see errors anywhere."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.pretend import pretended_nodes
from harness.world import everybody

import mpiddp as dist
from mpiddp.data import shared_on_node
from mpiddp.distributed.groups import default_group
from mpiddp.shm import segment

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3)]

Array = Any


@pytest.fixture(params=["one node", "two nodes"], autouse=True)
def _nodes(request: pytest.FixtureRequest, world: Any) -> Iterator[None]:
    """Run each test on the ranks as they are, and as if they were on two nodes."""
    if request.param == "one node":
        yield
        return
    if world.size == 1:
        pytest.skip("one rank is on one node")
    with pretended_nodes([rank % 2 for rank in range(world.size)]):
        yield


def of_ranks() -> list[int]:
    """Return the node of each rank."""
    return default_group()._link.nodes


def nodes() -> int:
    return len(set(of_ranks()))


def made(seed: int = 0) -> list[Array]:
    """Return arrays of odd sizes, types and orders."""
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((1001, 3)),
        np.asfortranarray(rng.integers(0, 9, (7, 5), np.uint8)),
        np.zeros((0, 4), np.float32),
        np.array(2.5),
        rng.integers(0, 9, 13)[::2],
        rng.standard_normal(100_003).astype(np.float32),
        rng.standard_normal(3) + 1j,
    ]


def count_calls(load: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], int]]:
    calls: list[None] = []

    def counted() -> Any:
        calls.append(None)
        return load()

    return counted, lambda: sum(everybody(len(calls)))


def test_every_rank_sees_what_one_rank_of_its_node_has_loaded(world: Any) -> None:
    load, calls = count_calls(made)
    found = shared_on_node(load)
    assert calls() == nodes()
    for x, expected in zip(found, made(), strict=True):
        assert type(x) is np.ndarray and x.dtype == expected.dtype and x.shape == expected.shape
        np.testing.assert_array_equal(x, expected)
        assert not x.flags.writeable and x.flags.aligned
        assert segment.find(x) == segment.NOWHERE, "a collective must not take it for symmetric memory"


def shares_memory_on_node(x: Array) -> bool:
    """Return True if the ranks of this node have mapped the same file for it, as the kernel counts files."""
    inode, mine = mapping_of(x).split()[4], of_ranks()[dist.get_rank()]
    told = everybody((mine, inode))
    return inode != "0" and {each for node, each in told if node == mine} == {inode}


def mapping_of(x: Array) -> str:
    """Return the kernel's line of the memory where ``x`` begins."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= x.__array_interface__["data"][0] < end:
            return line
    raise AssertionError


def test_one_copy_on_a_node(world: Any) -> None:
    if nodes() == world.size:
        pytest.skip("a rank on each node shares nothing")
    found = shared_on_node(made)
    assert shares_memory_on_node(found[0]) and shares_memory_on_node(found[5])


def test_memory_lives_as_long_as_a_view_and_is_given_back(world: Any) -> None:
    def mapped() -> int:
        gc.collect()
        return sum("memfd:mpiddp" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    (x,) = shared_on_node(lambda: [np.arange(1000.0)])
    part = x[10:20]
    del x
    gc.collect()
    np.testing.assert_array_equal(part, np.arange(10.0, 20.0))
    del part
    assert mapped() == before


def test_mapped_files_are_mapped_by_all(world: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        np.save(folder / "a.npy", made()[0])
        np.save(folder / "b.npy", np.asfortranarray(made()[0]))
    dist.barrier()

    def load() -> list[Array]:
        whole = np.load(folder / "a.npy", mmap_mode="r")
        return [whole, np.ones(3), np.load(folder / "b.npy", mmap_mode="r"), whole[5:]]

    a, ones, b, part = shared_on_node(load)
    np.testing.assert_array_equal(a, made()[0])
    np.testing.assert_array_equal(b, made()[0])
    np.testing.assert_array_equal(part, made()[0][5:])
    assert (ones == 1).all() and not a.flags.writeable and not part.flags.writeable
    if nodes() < world.size:
        assert mapping_of(a).endswith(f"{folder}/a.npy") and mapping_of(b).endswith(f"{folder}/b.npy")
        assert not mapping_of(part).endswith(".npy"), "a part has no known offset"
    dist.barrier()


def test_nothing_to_copy(world: Any) -> None:
    assert shared_on_node(list) == ()
    assert shared_on_node(lambda: [np.zeros((0, 3))])[0].shape == (0, 3)


class OddError(Exception):
    """Cannot be pickled: its arguments are not those of its constructor."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("error", "expected", "text", "where"),
    [
        (FileNotFoundError("no x.npy"), FileNotFoundError, "no x.npy", "everywhere"),
        (OddError(1, 2), RuntimeError, "OddError: 1 and 2", "last node"),
    ],
)
def test_every_rank_raises_what_one_has(world: Any, error: Exception, expected: Any, text: str, where: str) -> None:
    last = max(of_ranks())

    def load() -> list[Array]:
        if where == "everywhere" or of_ranks()[world.rank] == last:
            raise error
        return made()

    with pytest.raises(expected, match=text) as caught:
        shared_on_node(load)
    culprit = 0 if where == "everywhere" else of_ranks().index(last)
    notes = getattr(caught.value, "__notes__", [])
    assert any(f"on rank {culprit}, host " in note for note in notes) == (culprit > 0)
    assert shared_on_node(lambda: [np.ones(2)])[0].sum() == 2, "the group goes on"


@pytest.mark.parametrize("bad", [[[1, 2]], [np.array([{}])], [np.ones(2), None]], ids=["list", "objects", "none"])
def test_what_is_no_array_is_refused_everywhere(world: Any, bad: Any) -> None:
    with pytest.raises(TypeError, match="shared_on_node needs a function that returns NumPy arrays of numbers, got"):
        shared_on_node(lambda: bad)


def test_nodes_that_differ_are_both_named(world: Any) -> None:
    if nodes() == 1:
        pytest.skip("one node agrees with itself")
    mine = of_ranks()[world.rank]
    with pytest.raises(dist.MismatchError, match=r"float64 \(5,\) on rank 0 and float64 \(6,\) on rank 1"):
        shared_on_node(lambda: [np.ones(5 + mine)])
    found = shared_on_node(lambda: [np.full(5, mine)])
    assert (found[0] == mine).all(), "each node has its own"


def test_without_shared_memory_every_rank_loads(
    world: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(segment, "_make", refuse)
    load, calls = count_calls(made)
    alone = nodes() == world.size
    found = shared_on_node(load)
    expected = [] if alone or dist.get_rank() else ["no shared memory for a data set of "]
    assert [str(w.message)[:35] for w in recwarn] == expected
    assert calls() == (nodes() if alone else world.size)
    for x, original in zip(found, made(), strict=True):
        np.testing.assert_array_equal(x, original)
        assert not x.flags.writeable

    def fails_on_others() -> list[Array]:
        if default_group()._link.node.rank:
            raise OSError("only one may read this")
        return made()

    if nodes() < world.size:
        with pytest.raises(OSError, match="only one may read this"):
            shared_on_node(fails_on_others)


def refuse(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_part_of_the_ranks(world: Any) -> None:
    group = dist.new_group(sorted({0, world.size - 1}))
    load, calls = count_calls(made)
    found = shared_on_node(load, group)
    inside = world.rank in (0, world.size - 1)
    assert len(found) == (len(made()) if inside else 0)
    if inside:
        np.testing.assert_array_equal(found[5], made()[5])
    assert 1 <= calls() <= 2
    if inside:
        dist.destroy_process_group(group)
