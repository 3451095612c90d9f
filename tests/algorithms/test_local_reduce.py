"""Slices of an array, one for each rank."""

from mpiddp.algorithms import local_reduce


def test_slices_cover_the_array_and_begin_on_cache_lines() -> None:
    for count in (0, 1, 15, 16, 17, 1000):
        for parts in (1, 2, 3, 5):
            edges = local_reduce.bounds(count, parts, 4)
            assert edges[0] == 0 and edges[-1] == count and len(edges) == parts + 1
            assert [*edges] == sorted(edges)
            assert all(edge % 16 == 0 or edge == count for edge in edges)
