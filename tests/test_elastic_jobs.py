"""Runs that outlive their ranks, with spares or with fewer: ``mpirun --with-ft ulfm``.

``MPIDDP_TEST_KILLS=20 python -m pytest FILE --long`` kills twenty ranks at random moments; ``MPIDDP_TEST_SEED`` repeats
a choice.
"""

import contextlib
import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from harness.launcher import PROGRAMS, TIMED_OUT, ULFM, Completed, is_open_mpi, job, side_by_side, start
from harness.tiers import thinned

KILLS = int(os.environ.get("MPIDDP_TEST_KILLS", "4"))
SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))
pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on"),
]

COMMON = ("--batch-size", 96, "--output")
OPTIONS = ("--epochs", 4, "--model", "mlp", "--dropout", 0.2, "--optimizer", "adam", *COMMON)
FEWER = ("--epochs", 5, "--lr", 0.02, *COMMON)
STEP = "mpiddp.training.trainer:Trainer"
FORWARD = "mpiddp.nn:Sequential.forward"


def train(ranks: int, *options: object, victims: str = "", late: str = "", limit_s: float = 120) -> Completed:
    how = {"ranks": ranks, "options": ULFM, "search": [PROGRAMS], "limit_s": limit_s, "PYTHONHASHSEED": "0"}
    return job("lethal_train", *options, **how, VICTIMS=victims, LATE=late)


def model(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that trains with some options, on ranks of which none dies, and returns the folder."""
    folders: dict[tuple[object, ...], Path] = {}

    def run(ranks: int, *options: object) -> Path:
        if options not in folders:
            output = tmp_path_factory.mktemp("undisturbed") / "run"
            done = train(ranks, *options, output)
            assert done.rc == 0, done
            folders[options] = output
        return folders[options]

    return run


# (spares, victims); steps have numbers from 1, 15 an epoch.
SAME = {
    "rank 0 in backward": (1, f"0 before {STEP}._backward 20"),
    "after the optimizer's step": (1, "1 after mpiddp.optim:Optimizer.zero_grad 23"),
    "between steps": (1, f"2 after {STEP}._make_step 20"),
    "in the test": (1, "1 before mpiddp.training.trainer:Trainer.evaluate 2"),
    "rank 0 while it writes a checkpoint": (1, "0 after mpiddp.serialization:encode_arrays 2"),
    "two at once": (2, f"0 before {STEP}._backward 20,2 before {STEP}._backward 20"),
    "a spare after its promotion": (2, f"1 before {STEP}._make_step 10,3 before {STEP}._make_step 10"),
    "a spare that sleeps": (2, f"4 before mpiddp.elastic:_Places.wait 1,1 before {STEP}._make_step 20"),
    "before the first step": (1, "0 after mpiddp.training.run:build_trainer 1"),
    "while data are loaded": (1, "1 before mpiddp.training.run:load_data 1"),
    "in init_process_group": (1, "2 after mpiddp.mpi.world:gather 1"),
    "at the end": (1, "0 after mpiddp.training.run:_finish 1"),
}


@pytest.mark.parametrize("case", thinned(SAME, "rank 0 in backward"))
def test_run_with_a_spare_ends_with_the_bits_of_one_without_a_death(tmp_path, undisturbed, case):
    spares, victims = SAME[case]
    done = train(3 + spares, *OPTIONS, tmp_path / "run", "--spares", spares, victims=victims)
    assert done.rc == 0 and re.search("a spare|spares took 2 of 2 places", done.stderr), done
    assert model(tmp_path / "run") == model(undisturbed(3, *OPTIONS)), done


def test_without_spares_left_survivors_go_on_and_are_told_of_other_masks(tmp_path):
    victims = f"0 before {STEP}._backward 20,2 before {STEP}._backward 20"
    done = train(4, *OPTIONS, tmp_path / "run", "--spares", 1, victims=victims)
    assert done.rc == 0 and "with 2 of 3 ranks; dropout draws other masks" in done.stderr, done


STARTS = {
    "MPI_Init": (
        "1 before mpiddp.mpi.world:start_mpi 1",
        r"rank 1 of 3 ended before MPI had started",
    ),
    "init_process_group": ("0 before mpiddp.mpi.world:gather 1", r"1 of 3 ranks died during the start; 2 go on"),
}


@pytest.mark.parametrize("start", thinned(STARTS, "init_process_group"))
def test_death_during_the_start_is_survived_or_ends_the_job_with_its_reason(tmp_path, start):
    victims, said = STARTS[start]
    done = train(3, *OPTIONS, tmp_path / "run", "--epochs", 1, victims=victims, limit_s=40)
    assert done.rc != TIMED_OUT and re.search(said, done.stderr), done
    assert (done.rc == 0) == (start != "MPI_Init") and done.seconds < 30, done


def run_state(case: str, ranks: int, *args: object, **env: str) -> Completed:
    return job("elastic", case, *args, ranks=ranks, options=ULFM, limit_s=40, **env)


def test_script_goes_on_with_spares_and_one_that_is_not_needed_burns_no_core():
    done = run_state("sum", 6, 0, 2)
    assert done.rc == 0 and done.stdout.count("right\n") == 3, done
    share = float(re.search(r"slept (\S+)", done.stdout)[1])
    assert share < 0.2, share


def test_rank_that_is_gone_at_the_end_is_named_after_the_timeout():
    jobs = {ranks: partial(run_state, "stopped", ranks, MPIDDP_TIMEOUT="8") for ranks in (3, 2)}
    with side_by_side(jobs) as futures:
        spare, other = (future.result() for future in futures.values())
    waits = r"the end of elastic.run did not finish in 8 s: (?s:.*) rank 2 \(node .*  no answer"
    assert spare.rc == 110 and re.search(waits, spare.stderr), spare
    assert other.rc == 110 and "rank 0 has not answered for 8 s" in other.stderr, other


def test_question_to_a_job_with_spares_is_answered_by_all(tmp_path):
    done = run_state("asked", 3, tmp_path, MPIDDP_FLIGHT_RECORDER=f"{tmp_path}/rank_")
    assert done.rc == 0 and "flight recorder: 3 of 3 ranks wrote" in done.stderr, done


def test_training_goes_on_as_if_nothing_had_happened(tmp_path, undisturbed):
    options = ("--model", "models:normed", "--sync-batchnorm", *FEWER)
    expected, output = undisturbed(2, *options), tmp_path / "run"
    victims = f"0 before {FORWARD} {np.random.default_rng(SEED).integers(3, 40)}"
    done = train(3, *options, output, victims=victims)
    assert done.rc == 0 and len(re.findall(r"going on after step \d+ with 2 of 3 ranks", done.stderr)) == 1, done
    # The same global batches, so the same up to the order of additions.
    parameters = safetensors.numpy.load_file(output / "model.safetensors")
    for name, x in safetensors.numpy.load_file(expected / "model.safetensors").items():
        np.testing.assert_allclose(parameters[name], x, rtol=1e-2, atol=1e-3, err_msg=f"{name} ({victims})")
    losses, undisturbed_losses = ([each["loss"] for each in metrics(folder)] for folder in (output, expected))
    np.testing.assert_allclose(losses, undisturbed_losses, rtol=1e-3, err_msg=victims)
    assert [each["epoch"] for each in metrics(output)] == list(range(1, 6))


def test_virtual_ranks_of_the_dead_are_taken_over_without_a_change_of_bits(tmp_path, undisturbed):
    options = ("--model", "models:normed", "--virtual-ranks", 5, *FEWER)
    expected = undisturbed(2, *options)
    victims = f"0 before {STEP}._backward 20,2 after mpiddp.optim:Optimizer.zero_grad 47"
    done = train(4, *options, tmp_path / "run", victims=victims)
    assert done.rc == 0 and "with 2 of 3 ranks" in done.stderr, done
    assert "other masks" not in done.stderr and model(tmp_path / "run") == model(expected), done


@pytest.mark.long
def test_epoch_that_one_had_completed_and_another_had_not_is_in_all_files(tmp_path):
    evaluated = "after mpiddp.training.trainer:Trainer.evaluate 1"
    done = train(3, *FEWER, tmp_path, "--epochs", 2, victims=f"1 {evaluated}", late=f"0 {evaluated}")
    assert done.rc == 0 and "going on after step 15 with 2 of 3 ranks" in done.stderr, done
    assert [each["epoch"] for each in metrics(tmp_path)] == [1, 2]
    assert sorted(path.stem for path in (tmp_path / "checkpoints").iterdir()) == ["step-0000000015", "step-0000000030"]


def test_ranks_go_on_as_one_when_one_had_completed_the_step_and_another_had_not(tmp_path):
    options, updates = ("--dropout", 0, "--average", "models:compressed"), "before mpiddp.optim:SGD.step 8"
    done = train(3, *FEWER[:-1], *options, victims=f"1 {updates}", late=f"2 {updates}")
    assert done.rc == 0 and "going on after step 8 with 2 of 3 ranks" in done.stderr, done
    ended = re.findall("^ended with .*$", done.stdout, re.M)
    assert len(ended) == 2 and len(set(ended)) == 1, done


def test_deadline_holds_when_the_rank_that_knew_it_has_died(tmp_path):
    options = ("--model", "models:plain", "--epochs", 100_000, "--max-time", 8, "--margin", 1)
    done = train(3, *FEWER, tmp_path, *options, victims=f"0 before {FORWARD} 20", limit_s=60)
    assert done.rc == 75 and "with 2 of 3 ranks" in done.stderr and "--max-time on rank" in done.stdout, done


def test_sharded_optimizer_cannot_go_on_without_its_shards(tmp_path):
    done = train(3, *FEWER, tmp_path, "--model", "models:plain", "--zero", victims=f"1 before {FORWARD} 30", limit_s=60)
    assert done.rc == 1 and "RankFailedError: rank 1 of 3 died" in done.stderr, done


@pytest.mark.long
def test_random_kills_change_no_bit(tmp_path, undisturbed):
    """Ranks and spares at any time after the start, in runs of four kills."""
    rng = np.random.default_rng(SEED)
    for count in range(-(-KILLS // 4)):
        output = tmp_path / f"run-{count}"
        options = (*OPTIONS, output, "--spares", 4, "--checkpoint-steps", 3)
        with start("lethal_train", *options, ranks=7, options=ULFM) as job:
            while job.poll() is None and not (output / "run.json").exists():
                time.sleep(0.01)
            for _ in range(4):
                time.sleep(float(rng.exponential(0.3)))
                if len(alive := job.ranks()) > 3:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(rng.choice(alive)), signal.SIGKILL)
            done = job.wait(120)
        assert done.rc == 0 and model(output) == model(undisturbed(3, *OPTIONS)), f"seed {SEED}, run {count}: {done}"
