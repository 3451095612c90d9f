"""Options from command line and TOML file, and their errors; the BLAS threads of a run that is resumed."""

import dataclasses
import json
from pathlib import Path

import pytest

from mpiddp.cli import Parser
from mpiddp.training.config import Config, UsageError, add_options, read_options, resumed_threads


def parse(*arguments: str) -> Config:
    parser = Parser()
    add_options(parser)
    return read_options(parser.parse_args(arguments))


def test_nothing_given_is_the_defaults():
    assert parse() == Config()
    assert (Config().lr, Config().momentum, Config().batch_size, Config().epochs) == (0.01, 0.9, 64, 20)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--lr", "0.5"], "lr", 0.5),
        (["--output", "a/b"], "output", Path("a/b")),
        (["--zero"], "zero", True),
        (["--seed", "0"], "seed", 0),
        (["--no-zero"], "zero", False),
        (["--model", "package.module:Model"], "model", "package.module:Model"),
        (["--data", "npz:a b.npz"], "data", "npz:a b.npz"),
    ],
)
def test_option_becomes_field(arguments, name, value):
    config = parse(*arguments)
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)
    assert config == dataclasses.replace(Config(), **{name: value})


def test_every_field_is_an_option_with_help():
    parser = Parser()
    add_options(parser)
    text = parser.format_help()
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"].split()[0] in text


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('epochs = 3\nlr = 1\nmodel = "mlp"\noutput = "runs/a"\nzero = true\nsync_batchnorm = false\n')
    for epochs in (5, Config().epochs):
        config = parse("--config", str(file), "--epochs", str(epochs))
        assert config == Config(epochs=epochs, lr=1.0, model="mlp", output=Path("runs/a"), zero=True)
        assert type(config.lr) is float


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("epoch = 3", "unknown configuration key 'epoch'; did you mean epochs?"),
        ("[optimization]\nlr = 0.1", "unknown configuration key 'optimization'"),
        ("epochs = 3.0", "run.toml: argument --epochs: invalid int value: '3.0'"),
        ("epochs = false", "argument --epochs: invalid int value: 'False'"),
        ("zero = 1", "argument --zero/--no-zero: ignored explicit argument '1'"),
        ("lr = [1]", r"argument --lr: invalid float value: '\[1\]'"),
        ("epochs = ", "run.toml"),
        ('model = "nte"', "--model has to be net, mlp, resnet, MODULE:CALLABLE, got 'nte'; did you mean net?"),
    ],
)
def test_wrong_file_is_refused(tmp_path, content, said):
    file = tmp_path / "run.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        parse("--config", str(file))


@pytest.mark.parametrize("option", ["output", "metrics"])
def test_empty_path_is_not_the_working_directory(tmp_path, option):
    (tmp_path / "empty.toml").write_text(f'{option} = ""')
    for arguments in (f"--{option}", ""), ("--config", str(tmp_path / "empty.toml")):
        with pytest.raises(UsageError, match=f"--{option}: a path has to be given, got ''"):
            parse(*arguments)


EMPTY = "has an empty part: give MODULE:CALLABLE without gaps"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        *(({"lr": each}, "--lr") for each in (0.0, float("nan"), float("inf"))),
        ({"epochs": 0}, "--epochs"),
        ({"momentum": 1.0}, "--momentum"),
        ({"dropout": float("nan")}, "--dropout"),
        ({"seed": -1}, "--seed"),
        ({"data": "mnist"}, "--data"),
        *(({"data": each}, EMPTY.replace("MODULE", "npz:FILE or MODULE")) for each in ("npz:", ":make")),
        ({"model": "module:"}, EMPTY),
        ({"resume": "auto"}, "--resume auto needs --output DIR"),
        ({"checkpoint_steps": 5}, "--checkpoint-steps needs --output DIR"),
        ({"max_time": "90"}, "--max-time stops with a checkpoint: give --output DIR"),
        ({"model": "a.b:C", "dropout": 0.1}, "--dropout is for the models that have a name here"),
        ({"optimizer": "a.b:c", "momentum": 0.5}, "--momentum is for the optimizers that have a name here"),
        ({"spares": 1, "zero": True}, "--spares: with --zero a rank's part of the optimizer state is on that rank"),
        ({"spares": 1, "device": "cuda"}, "--spares: ranks on GPUs cannot go on after a death"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(values, said):
    with pytest.raises(UsageError, match=said):
        Config(**values)


def checkpoint(output, step, text):
    """Write the beginning of a file of `mpiddp.save`, by the format's description."""
    path = output / "checkpoints" / f"step-{step:010d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"mpiddp.state": text}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def bits(ranks, threads):
    return json.dumps({"state": {"bits": {"ranks": ranks, "BLAS threads": threads}}})


def test_of_the_newest_checkpoint_that_can_be_read(tmp_path):
    assert resumed_threads(tmp_path, 2) is None
    checkpoint(tmp_path, 9, bits(2, 8))
    checkpoint(tmp_path, 10, bits(2, 3))
    checkpoint(tmp_path, 11, "{damaged")
    checkpoint(tmp_path, 12, "[]")
    (tmp_path / "checkpoints" / "step-0000000013.safetensors").write_bytes(b"\xff" * 16)
    assert resumed_threads(tmp_path, 2) == 3
    assert resumed_threads(tmp_path, 4) is None, "the bits of another number of ranks are others anyway"
    checkpoint(tmp_path, 13, bits(2, None))
    assert resumed_threads(tmp_path, 2) is None, "it has set none"
    assert resumed_threads(tmp_path / ("x" * 300), 2) is None, "a folder that cannot be read"
