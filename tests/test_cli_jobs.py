"""The command line: python -m mpiddp, alone and under mpirun."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from harness import launcher
from harness.launcher import Completed

from mpiddp import cores

NO_THREADS = dict.fromkeys(cores.THREAD_VARIABLES)


def run(ranks: int | None, *arguments: object, **env: str | None) -> Completed:
    return launcher.job("-m", "mpiddp", *arguments, ranks=ranks, limit_s=120, **env)


def test_train_prints_and_writes_what_it_promises(tmp_path):
    done = run(3, "train", "--epochs", "2", "--metrics", tmp_path / "m.jsonl", "--output", tmp_path / "out")
    assert done.rc == 0, done
    assert done.stdout.count("training on 3 ranks on 1 node") == 1, done
    assert re.search(r"^  optimization: +optimizer=sgd, lr=0\.01, .*\n  ddp: +average=ddp\n", done.stdout, re.M), done
    assert re.findall(r"^epoch (\d)/2  loss \d", done.stdout, re.MULTILINE) == ["1", "2"], done
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    for line in lines:
        assert 0 <= line["accuracy"] <= 1 and 0 <= line["comm_exposed"] < 1
        assert line["samples_per_s"] * line["epoch_s"] == pytest.approx(1437)
        assert line["accuracy"] * 360 == pytest.approx(round(line["accuracy"] * 360)), "of 360, each counted once"
    assert lines[1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == (tmp_path / "m.jsonl").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["epochs"] == 2
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [place["rank"] for place in described["ranks"]] == [0, 1, 2] and "train --epochs 2" in described["command"]
    assert {"versions", "mpi", "commits", "started"} <= described.keys()
    assert all(re.fullmatch("[0-9a-f]{40}(-dirty)?", each) for each in described["commits"].values() if each), described
    saved = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert saved["fc1.weight"].shape == (50, 320)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")]


def test_the_tutorials_run_reaches_97_percent():
    """With the figures of the first page. Seconds are not tested: the machine may be busy."""
    done = run(4, "train", **NO_THREADS)
    assert done.rc == 0, done
    line = r"epoch +(1|20)/20  loss (\S+)  accuracy (\S+)"
    shown, found = (
        [tuple(map(float, each)) for each in re.findall(line, text)]
        for text in ((Path(__file__).parents[1] / "README.md").read_text(), done.stdout)
    )
    assert len(shown) == 2 and found[0] == pytest.approx(shown[0], abs=3e-3), (shown, found)
    assert found[1] == pytest.approx(shown[1], abs=0.1), "rounding differs between processors, and grows"
    accuracies = [float(found) for found in re.findall(r"accuracy (0\.\d+|1\.0+)", done.stdout)]
    assert len(accuracies) == 20 and max(accuracies) >= 0.97, done
    assert accuracies[-1] >= 0.96, done


@pytest.mark.parametrize("ranks", [None, 2])
def test_info(ranks):
    done = run(ranks, "info")
    assert done.rc == 0, done
    words = ["MPI library", "loaded from", "thread level", "launcher  ", "mpi4py", "shared memory", "BLAS  "]
    words += ["GPU pointers   point to point", "GPU pointers   collectives", "algorithms     all_reduce"]
    for word in words:
        assert done.stdout.count(word) == 1, (word, done)
    assert re.search(r"libmpi\S*\.so", done.stdout), done
    table = done.stdout[done.stdout.index("rank  host") :].splitlines()
    assert [line.split()[0] for line in table[1:] if line[0].isdigit()] == [str(rank) for rank in range(ranks or 1)]
    assert ("started plainly" in done.stdout) == (ranks is None)


def test_info_json_on_pretended_nodes():
    done = run(4, "info", "--json", MPIDDP_NODES="0,0,1,1", MPIDDP_TIMOUT="5", **NO_THREADS)
    assert done.rc == 0, done
    assert len(re.findall("BLAS threads: [0-9]+ a rank", done.stderr)) == 1, done
    assert done.stderr.count("MPIDDP_TIMOUT is set, and mpiddp has no such variable: did you mean MPIDDP_TIMEOUT?") == 1
    found = json.loads(done.stdout)
    assert [place["node"] for place in found["ranks"]] == [0, 0, 1, 1]
    assert [place["local_rank"] for place in found["ranks"]] == [0, 1, 0, 1]
    assert found["versions"]["numpy"] == np.__version__
    assert found["watchdog"] == "on"
    assert 1 <= found["blas"]["threads"] <= len(found["ranks"][0]["cores"])


WRONG = {
    "option": (["train", "--epoch", "3"], "unknown argument --epoch; did you mean --epochs?"),
    "command": (["trian"], "invalid choice: 'trian'"),
    "nothing": ([], "COMMAND"),
    "model": (["train", "--model", "json:Model"], "json:Model: AttributeError: module 'json' has no attribute 'Model'"),
    "data": (["train", "--data", "mnist", "--data-dir", "/nowhere"], "train-images-idx3-ubyte"),
    "batch": (["train", "--batch-size", "2"], "use 3 or more"),
    "output": (["train", "--output", "/proc/none"], "/proc/none"),
    "file as output": (["train", "--output", "/dev/null/run"], "Not a directory: '/dev/null/run"),
    "folder as metrics": (["train", "--metrics", "/dev"], "Is a directory: '/dev'"),
    "variable": (
        ["MPIDDP_TIMEOUT=abc", "train"],
        "MPIDDP_TIMEOUT must be a finite number of seconds above 0; got 'abc'",
    ),
    "algorithm": (["MPIDDP_ALGORITHM=all_reduce:rign", "train"], "there is no algorithm all_reduce:rign"),
}
"""Command lines, with variables in front of them, and what is said of them."""


def assert_one_line(code: int, stdout: str, stderr: str, said: str) -> None:
    assert code == 2 and said in stderr, (stdout, stderr)
    assert stderr.count("mpiddp: error:") == 1 and "Traceback" not in stderr, (stdout, stderr)


def test_users_error_is_told_by_a_rank_0_that_comes_later_than_the_others():
    done = launcher.job("cli", "late", "train", "--epoch", "3", ranks=3)
    assert_one_line(done.rc, done.stdout, done.stderr, WRONG["option"][1])


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[tuple[int, str, str]]]:
    """Make every mistake in one job; return exit code, stdout and stderr of each rank."""
    done = launcher.job("mistakes", json.dumps([arguments for arguments, _ in WRONG.values()]), ranks=3)
    assert done.rc == 0, done
    return dict(zip(WRONG, zip(*json.loads(done.stdout), strict=True), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_users_error_is_told_by_rank_0(wrong, name):
    first, *others = wrong[name]
    assert_one_line(*first, WRONG[name][1])
    assert others == [[2, "", ""]] * 2


@pytest.mark.long
def test_a_signal_that_comes_while_a_stopped_run_saves_does_not_end_it(tmp_path):
    # The signal to stop follows the first checkpoint; then there is another, and another signal.
    options = ("train", "--model", "mlp", "--epochs", "3", "--batch-size", "512", "--output", str(tmp_path))
    stopped = launcher.job("cli", "signal after saving", *options, ranks=2)
    assert stopped.rc == 75 and "stopped after step 4, saved a checkpoint" in stopped.stdout, stopped
    assert sorted(path.stem for path in (tmp_path / "checkpoints").iterdir()) == ["step-0000000003", "step-0000000004"]


@pytest.mark.core
def test_ranks_that_have_stopped_say_so_whatever_the_launcher_does_to_them_then(tmp_path):
    options = ("train", "--model", "mlp", "--max-time", "1", "--margin", "1", "--output", str(tmp_path))
    stopped = launcher.job("cli", "signal at the end", *options, ranks=2)
    assert stopped.rc == 75 and "--max-time on rank 0: stopped after step 1, saved" in stopped.stdout, stopped


def test_a_signal_that_comes_while_the_data_are_loaded_stops_the_run_after_a_step(tmp_path):
    stopped = launcher.job("cli", "signal while loading", "train", "--model", "mlp", "--output", tmp_path, ranks=2)
    assert stopped.rc == 75 and "SIGUSR1 on rank 0: stopped after step 1, saved" in stopped.stdout, stopped


def test_the_model_is_saved_even_if_the_last_checkpoint_cannot_be(tmp_path):
    (tmp_path / "checkpoints").touch()  # in the folder's place
    done = run(2, "train", "--model", "mlp", "--epochs", "1", "--output", tmp_path)
    assert done.rc == 1 and re.search(r"error: .*File exists: '.*/checkpoints'", done.stderr), done
    assert "saved" in done.stdout and (tmp_path / "model.safetensors").exists(), done


def test_steps_that_are_left_out_are_said(tmp_path):
    """Of a run that a file configures."""
    (tmp_path / "run.toml").write_text('model = "mlp"\nepochs = 2\nlr = 1e30\non_nan = "skip"\n')
    done = run(2, "train", "--config", tmp_path / "run.toml", "--metrics", tmp_path / "m.jsonl")
    assert re.findall(r"warning: (\d+) steps of epoch (\d) left out", done.stderr) == [("22", "1")], done
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 1
    # There is nothing to go on for.
    said = "mpiddp: error: 23 steps in a row were left out: the loss is not"
    assert done.rc == 1 and done.stderr.count(said) == 1, done
    assert "not finite on rank 0, 1 at step 24 (epoch 2), with finite parameters" in done.stderr, done
    assert re.search(r"the largest \S+e\+2\d in layers\.\d\.weight; lower the learning rate", done.stderr), done


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files but the lock, which names its last owner."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_run_that_is_refused_leaves_the_folder_as_it_was(tmp_path):
    begun = run(None, "train", "--epochs", "1", "--model", "mlp", "--output", tmp_path)
    assert begun.rc == 0, begun
    before = contents(tmp_path)
    for options, said in (
        (["--model", "net", "--resume", "auto"], "made with model=mlp"),
        (["--model", "mlp", "--lr", "0.5"], "--resume auto goes on with it"),
    ):
        refused = run(None, "train", *options, "--output", tmp_path)
        assert_one_line(refused.rc, refused.stdout, refused.stderr, said)
    assert contents(tmp_path) == before


@pytest.mark.core
def test_ctrl_c_is_one_message(tmp_path):
    with launcher.start("-m", "mpiddp", "train", "--epochs", "500", ranks=2) as job:
        job.wait_for("epoch   2/500")
        job.signal(signal.SIGINT)
        done = job.wait(30)
    assert done.rc != 0, done
    assert "Traceback" not in done.stdout + done.stderr, done
    assert (done.stdout + done.stderr).count("SIGINT on rank") <= 1, done
