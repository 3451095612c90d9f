import pytest

from mpiddp.parallel.weights import rank_weight


@pytest.mark.parametrize(("n", "total"), [(-1, 4), (5, 4), (0, 0)])
def test_impossible_numbers_of_samples_are_refused(n: int, total: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        rank_weight(n, total)
