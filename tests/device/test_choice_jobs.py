"""``train --device``: on a fake device the host's numbers, and without one a text with the cure."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from harness.faking import FOLDER
from harness.launcher import Completed, job

without_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")


def train(*arguments: str | Path, ranks: int = 2, cupy: Path | None = None) -> Completed:
    options = ("--epochs", "1", "--dropout", "0", *arguments)
    return job("-m", "mpiddp", "train", *options, ranks=ranks, search=[cupy] if cupy else (), limit_s=120)


@pytest.mark.parametrize(("model", "ranks"), [("net", 3), pytest.param("resnet", 2, marks=pytest.mark.long)])
def test_a_run_on_the_device_is_that_of_the_host(model: str, ranks: int, tmp_path: Path) -> None:
    """The fake has two GPUs: three ranks share one, and the run, which asks for NCCL, says so."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "few.npz", x=rng.integers(0, 256, (300, 28, 28), np.uint8), y=rng.integers(0, 10, 300))
    found = {}
    for device in ("cpu", "cuda"):
        file = tmp_path / device
        arguments = ("--model", model, "--device", device, "--metrics", file, "--data", f"npz:{tmp_path}/few.npz")
        done = train(*arguments, ranks=ranks, cupy=FOLDER)
        assert done.rc == 0, done
        assert f"device={device}" in done.stdout
        assert ("backend 'nccl' gives 'mpi'" in done.stderr) == (device == "cuda" and ranks == 3), done
        found[device] = json.loads(file.read_text())
    for name in ("loss", "test_loss"):
        assert found["cuda"][name] == pytest.approx(found["cpu"][name], rel=1e-3)


def test_a_program_ends_with_an_operation_on_its_way() -> None:
    """Without destroy_process_group: ranks wait for the end of all operations."""
    done = job("leaving_device", ranks=3, search=[FOLDER], PYTHONWARNINGS="ignore")
    assert done.rc == 0 and done.stdout.split() == ["end"] * 3, done
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr, done


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "CuPy is not installed: pip install 'mpiddp[cuda12]'", marks=without_cupy),
        ("def is_available():\n    return False\n", "CuPy finds no usable GPU: check nvidia-smi"),
        ("raise ImportError('libnvrtc.so.12: cannot open')\n", "CuPy cannot be imported: libnvrtc.so.12"),
    ],
)
def test_what_is_missing_is_said_once(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "cupy.py").write_text(text)
    done = train("--device", "cuda", cupy=tmp_path)
    assert done.rc == 2 and done.stderr.count(f"mpiddp: error: --device cuda: {said}") == 1, done
