import json

import numpy as np
import pytest

from mpiddp.autograd import Tensor
from mpiddp.training.metrics import EpochMetrics, MetricSum, count_correct


def metrics(epoch: int = 1, loss: float = 0.5) -> EpochMetrics:
    return EpochMetrics(
        epoch=epoch,
        loss=loss,
        accuracy=0.25,
        samples_per_s=10.0,
        comm_exposed=0.1,
        epoch_s=2.0,
        test_loss=0.75,
        test_s=0.1,
        lr=0.01,
    )


def test_count_correct_counts_the_largest_output():
    rng = np.random.default_rng(3)
    output, target = rng.standard_normal((50, 7)), rng.integers(0, 7, 50)
    expected = sum(max(range(7), key=lambda c: output[i, c]) == target[i] for i in range(50))
    assert 0 < expected < 50
    assert count_correct(output, target) == expected
    assert count_correct(Tensor(output, requires_grad=True) * 2, target) == expected


def test_tally_is_exact_where_float32_would_not_be():
    tally = MetricSum()
    tally.add(samples=1, loss=2.0**24)
    for _ in range(100):
        tally.add(samples=1, loss=1.0)
    assert tally["loss"] == 2**24 + 100
    assert tally.mean("loss") == (2**24 + 100) / 101


def test_no_number_is_null_in_json(tmp_path):
    assert json.loads(metrics(loss=float("nan")).as_json(), parse_constant=pytest.fail)["loss"] is None
