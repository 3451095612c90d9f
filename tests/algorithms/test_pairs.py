import numpy as np
import pytest
from harness.pretend import pretended_nodes

import mpiddp as dist
from mpiddp.algorithms.pairs import merges, shares


def tree(leaves: range) -> str:
    """Return a sum in pairs as text: each part is halved, the first half being the longer one."""
    if len(leaves) == 1:
        return str(leaves.start)
    middle = leaves.start + -(-len(leaves) // 2)
    return f"({tree(range(leaves.start, middle))}+{tree(range(middle, leaves.stop))})"


def added(texts: list[str], counts: tuple[int, ...]) -> str:
    opened: list[str] = []
    for text, ended in zip(texts, counts, strict=True):
        opened.append(text)
        for _ in range(ended):
            right, left = opened.pop(), opened.pop()
            opened.append(f"({left}+{right})")
    (whole,) = opened
    return whole


@pytest.mark.parametrize("leaves", range(1, 18))
def test_any_number_of_ranks_adds_in_one_order(leaves):
    for ranks in range(1, leaves + 1):
        parts = shares(leaves, ranks)
        assert [leaf for part in parts for leaf in part] == list(range(leaves))
        alone = [added([str(leaf) for leaf in part], merges(part, [range(x, x + 1) for x in part])) for part in parts]
        assert added(alone, merges(range(leaves), parts)) == tree(range(leaves))
        assert max(map(len, parts)) < 2 * leaves / ranks + 1, "the largest share"


def test_no_rank_is_without_a_virtual_rank():
    with pytest.raises(ValueError, match="4 virtual ranks can be shared by 1 to 4 ranks, and there are 5"):
        shares(4, 5)


@pytest.mark.mpi
@pytest.mark.ranks(3)
@pytest.mark.parametrize("symmetric", [False, True])
def test_deterministic_sums_between_nodes_have_one_order_on_all_sizes(world, monkeypatch, symmetric):
    """MPI's own reductions would serve up to 256 KiB, hierarchical ones more."""
    monkeypatch.setenv("MPIDDP_DETERMINISTIC", "1")
    x = np.random.default_rng(world.rank).standard_normal(1 << 18)
    with pretended_nodes((0, 1, 0, 1)[: world.size]):
        results = []
        for count in (1 << 18, 1 << 16, 32_769, 32_768, 32_767, 1 << 12, 129, 128, 50):
            part = dist.symmetric_empty(count, np.float64) if symmetric else np.empty(count)
            part[...] = x[:count]
            dist.all_reduce(part)
            results.append(part[:50].tobytes())
    assert len(set(results)) == 1
