"""A run that is resumed keeps its number of BLAS threads."""

from __future__ import annotations

import json
import os

import pytest

from mpiddp import settings
from mpiddp.training.threads import resumed_threads


def checkpoint(output, step, text):
    folder = output / "checkpoints" / f"step-{step:010d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)


def bits(ranks, threads):
    return json.dumps({"bits": {"ranks": ranks, "BLAS threads": threads}})


def test_of_the_newest_checkpoint_that_can_be_read(tmp_path):
    assert resumed_threads(tmp_path, 2) is None
    checkpoint(tmp_path, 9, bits(2, 8))
    checkpoint(tmp_path, 10, bits(2, 3))
    checkpoint(tmp_path, 11, "{damaged")
    checkpoint(tmp_path, 12, "[]")
    assert resumed_threads(tmp_path, 2) == 3
    assert resumed_threads(tmp_path, 4) is None, "the bits of another number of ranks are others anyway"


def test_a_run_that_has_set_none(tmp_path):
    checkpoint(tmp_path, 1, bits(2, None))
    assert resumed_threads(tmp_path, 2) is None


@pytest.mark.parametrize(("given", "expected"), [(None, {5}), (7, {7})])
def test_they_take_the_place_of_the_share(monkeypatch, given, expected):
    environment = {name: value for name, value in os.environ.items() if name not in settings.THREAD_VARIABLES}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(settings, "_share_of_cores", lambda: 5)
    assert {settings.limit_blas_threads(given)} == expected == {settings.blas_threads()}
    assert settings.limit_blas_threads(9) is None, "what the environment says goes before"
