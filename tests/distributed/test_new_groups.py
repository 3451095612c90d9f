"""Groups of some ranks: subgroups, parts of groups, and what is wrong with a list of ranks."""

import pytest
from harness.inputs import total

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4), pytest.mark.core, pytest.mark.usefixtures("anew")]

NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def test_bad_ranks(world):
    count = dist.get_pg_count()
    bad = dict.fromkeys(("01", 0), TypeError) | dict.fromkeys([(0, 0), (-1,), (4,)], ValueError)
    bad |= dict.fromkeys([(), (0.5,), (None,)], TypeError)
    for given, error in [*bad.items(), ((True,), TypeError)]:
        ranks = list(given) if isinstance(given, tuple) else given
        for call in (
            lambda ranks=ranks: dist.new_group(ranks),
            lambda ranks=ranks: dist.new_subgroups_by_enumeration([ranks]),
            lambda ranks=ranks: dist.split_group(None, [ranks]),
        ):
            with pytest.raises(error):
                call()
    assert dist.get_pg_count() == count
    assert total(None, 1) == world.size


def test_subgroups(world):
    for size in range(1, world.size + 1):
        if world.size % size:
            with pytest.raises(ValueError, match="divisible"):
                dist.new_subgroups(size)
            continue
        mine, all_of_them = dist.new_subgroups(size)
        first = world.rank // size * size
        assert len(all_of_them) == world.size // size
        assert dist.get_process_group_ranks(mine) == list(range(first, first + size))
        assert [each is mine for each in all_of_them].count(True) == 1
        assert all(each == NON_MEMBER for each in all_of_them if each is not mine)
        assert total(mine, world.rank) == sum(range(first, first + size))
    for wrong in (0, -1, world.size + 1, 1.5):
        with pytest.raises(ValueError):
            dist.new_subgroups(wrong)
    mine, _ = dist.new_subgroups()  # those of a node
    assert dist.get_world_size(mine) == world.size


def test_subgroups_of_a_group(world):
    ranks = list(reversed(range(world.size - world.size % 2 or 1)))
    part = dist.new_group(ranks, sort_ranks=False)
    if part == NON_MEMBER:
        with pytest.warns(UserWarning):
            assert dist.new_subgroups(2, part) == (None, [])
        return
    size = min(2, len(ranks))
    mine, every = dist.new_subgroups(size, part)
    place = ranks.index(world.rank) // size
    assert every[place] is mine
    assert dist.get_process_group_ranks(mine) == ranks[place * size : place * size + size]


def test_subgroups_by_enumeration(world):
    lists = [[world.size - 1], list(range(world.size - 1))] if world.size > 1 else [[0]]
    mine, all_of_them = dist.new_subgroups_by_enumeration(lists)
    assert len(all_of_them) == len(lists)
    assert total(mine, 1) == (1 if world.rank == world.size - 1 else world.size - 1)
    nobody, all_of_them = dist.new_subgroups_by_enumeration([[0]])
    assert (nobody is None) == (world.rank != 0)
    assert world.rank == 0 or all_of_them == [NON_MEMBER]
    count = dist.get_pg_count()
    with pytest.raises(ValueError, match="Rank 0 has appeared in both subgroup"):
        dist.new_subgroups_by_enumeration([[0], list(range(world.size))])
    with pytest.raises(ValueError, match="empty"):
        dist.new_subgroups_by_enumeration([])
    assert dist.get_pg_count() == count, "a group was made before the lists were checked"


def test_split(world):
    ranks = list(reversed(range(world.size)))
    parent, ordered = dist.new_group(ranks, sort_ranks=False), dist.new_group(ranks)
    assert dist.get_process_group_ranks(parent) == ranks == dist.get_process_group_ranks(ordered)[::-1]
    parts = [[0], list(range(1, world.size))] if world.size > 1 else [[0]]
    with pytest.raises(ValueError, match=f"rank.* {world.size}"):
        dist.split_group(parent, [[world.size]])
    mine = dist.split_group(parent, parts, group_desc="half")
    expected = [ranks[place] for place in parts[0 if dist.get_rank(parent) == 0 else 1]]
    assert dist.get_process_group_ranks(mine) == expected
    assert mine.group_desc == "half"
    assert total(mine, world.rank) == sum(expected)
    out = dist.split_group(parent, [[0]])
    assert (out is None) == (dist.get_rank(parent) != 0)
    with pytest.raises(ValueError, match="Rank 0 has appeared in both subgroup"):
        dist.split_group(parent, [[0], [0]])
    with pytest.raises(ValueError, match="empty"):
        dist.split_group(parent, [])


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_hear_of_it(world):
    ranks = [0] if world.rank == world.size - 1 else [0, 1]
    text = rf"rank 0 calls .*\[\[0, 1\]\], rank {world.size - 1} calls .*\[\[0\]\];"
    with pytest.raises(dist.MismatchError, match=text):
        dist.new_group(ranks)
    assert total(None, 1) == world.size


@pytest.mark.mpi(min_size=2)
def test_ranks_that_make_groups_by_other_calls_hear_of_both(world, group):
    with pytest.raises(dist.MismatchError, match=r"calls split_group.*calls new_subgroups"):
        if world.rank == world.size - 1:
            dist.new_subgroups(1, group)
        else:
            dist.split_group(group, [[rank] for rank in range(world.size)])


def test_local_synchronization(world):
    count = dist.get_pg_count()
    groups = []
    # Overlapping chains and pairs, of which every rank makes only its own: torch deadlocks here.
    lists = [[rank, rank + 1] for rank in range(world.size - 1)]
    lists += [[0, world.size - 1]] * (world.size > 2) + [list(range(world.size))]
    for ranks in lists:
        if world.rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert dist.get_process_group_ranks(group) == ranks
            assert total(group, world.rank) == sum(ranks)
            groups.append(group)
        elif world.rank % 2:
            assert dist.new_group(ranks, use_local_synchronization=True) is None
    assert dist.get_pg_count() == count + len(groups)
    for group in groups:
        assert total(group, 1) == dist.get_world_size(group)
