"""Parameters that share a bucket: torch's rules for explicit caps, ours for the default."""

import numpy as np
import pytest

from mpiddp.parallel.buckets import DEFAULT_CAP_BYTES, LAST_CAP_BYTES, LEAST_BYTES, MIB, assign_to_buckets


def sizes_of(buckets: list[list[int]], sizes: list[int]) -> list[int]:
    return [sum(sizes[index] for index in bucket) for bucket in buckets]


def backwards(n: int) -> list[int]:
    return list(reversed(range(n)))


@pytest.mark.parametrize(
    ("sizes", "kinds", "caps", "buckets"),
    [
        # Measured on torch 2.13: the parameter that crosses the cap is included.
        ([16384] * 6, "f" * 6, [20971], [[5, 4], [3, 2], [1, 0]]),
        # Measured on torch 2.13: each bucket has its own cap, and the last one holds for the rest.
        ([MIB] * 9, "f" * 9, [MIB, 2 * MIB, 3 * MIB], [[8], [7, 6], [5, 4, 3], [2, 1, 0]]),
        # Measured on torch 2.13: "576, 288" for a float64 and a float32 half of a model.
        ([256, 32, 512, 64], "ffdd", [25 * MIB], [[3, 2], [1, 0]]),
        # In the order in which they are complete.
        ([4] * 6, "ababab", [8], [[5, 3], [4, 2], [1], [0]]),
    ],
)
def test_explicit_caps(sizes: list[int], kinds: str, caps: list[int], buckets: list[list[int]]) -> None:
    assert assign_to_buckets(backwards(len(sizes)), sizes, kinds, caps) == buckets


def test_by_default_the_bucket_that_closes_last_is_the_small_one() -> None:
    sizes = [MIB // 2] * 4 + [MIB] * 60
    buckets = assign_to_buckets(backwards(64), sizes, "f" * 64)
    found = sizes_of(buckets, sizes)
    assert found[-1] == LAST_CAP_BYTES
    assert 0 in buckets[-1]
    assert all(size <= DEFAULT_CAP_BYTES for size in found)
    assert sum(found) == sum(sizes)


def test_a_little_rest_makes_no_bucket_of_its_own() -> None:
    # 784-256-256-10 in float32: the last layers would be 10 KB.
    sizes = [4 * n for n in (784 * 256, 256, 256 * 256, 256, 2560, 10)]
    assert assign_to_buckets(backwards(6), sizes, "f" * 6) == [[5, 4, 3, 2, 1, 0]]
    assert len(assign_to_buckets(backwards(7), [*sizes, LEAST_BYTES], "f" * 7)) == 2
    assert assign_to_buckets([1, 0], [4, 4], "ab") == [[1], [0]]


@pytest.mark.parametrize("caps", [None, [1], [1000], [64, 4096]])
def test_every_parameter_is_in_one_bucket_and_buckets_are_in_order_of_completion(caps: list[int] | None) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        n = int(rng.integers(1, 40))
        order = rng.permutation(n).tolist()
        sizes = rng.choice([0, 4, 64, 1024, 3 * MIB], n).tolist()
        kinds = rng.choice(["float32", "float64", "bfloat16"], n).tolist()
        buckets = assign_to_buckets(order, sizes, kinds, caps)
        assert sorted(index for bucket in buckets for index in bucket) == list(range(n))
        assert all(len({kinds[index] for index in bucket}) == 1 for bucket in buckets)
        place = {index: position for position, index in enumerate(order)}
        last = [max(place[index] for index in bucket) for bucket in buckets]
        assert last == sorted(last)
        assert all([place[i] for i in bucket] == sorted(place[i] for i in bucket) for bucket in buckets)
