"""Options of a configuration: on the command line, in TOML files, and in the messages of all three voices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import OptionError, named, naming
from ddp_hpc.base.options import argument_names, to_options
from ddp_hpc.base.toml_options import as_toml, toml_options
from ddp_hpc.request.job import Job
from ddp_hpc.train import command, config_of
from ddp_hpc.training.config import TrainConfig


def configured(*arguments: str) -> TrainConfig:
    options: dict[str, Any] = dict(command.make_context("train", [*arguments]).params)
    return config_of(options.pop("file"), options)


def test_every_option_of_the_configuration_is_on_the_command_line() -> None:
    on_command_line = {parameter.name for parameter in command.params}
    assert on_command_line - {"file", "version"} == {*to_options(TrainConfig())}


def test_the_command_line_has_the_defaults_of_the_configuration() -> None:
    assert configured() == TrainConfig()


def test_every_help_text_is_a_sentence() -> None:
    for parameter in command.params:
        assert isinstance(parameter, click.Option)
        text = (parameter.help or "").partition("  [default")[0]
        assert text[:1].isalnum() or text[:1] in "$-", parameter.name
        assert text.endswith((".", ")")), (parameter.name, text)


def test_a_configuration_can_be_written_to_and_read_from_toml(tmp_path: Path) -> None:
    config = TrainConfig.of(
        data=Path("a b.h5"),
        src_shape=(3, 4),
        model="mine:net",
        model_options=(("layers", 6), ("act", "relu")),
        trace_ranks=frozenset({0, 7}),
        compile="reduce-overhead",
        snapshots=False,
        timeout=12.5,
        mesh="dp=2,tp=2",
    )
    (tmp_path / "run.toml").write_text(as_toml(config))
    assert configured("--config", str(tmp_path / "run.toml")) == config


def test_the_command_line_takes_precedence_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "epochs = 3\n[optimization]\nlr = 0.5\naccumulate = 2\n[data]\nbatch_size = 8\nshuffle = false\n"
    )
    config = configured("--lr", "0.25", "--config", str(file))
    assert (config.epochs, config.optimization.lr, config.optimization.accumulate) == (3, 0.25, 2)
    assert (config.data.batch_size, config.data.shuffle) == (8, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs = 3", 'run.toml: unknown key "epohcs" (did you mean "epochs"?)'),
        ("[optimization]\nbatch_size = 3", 'run.toml: unknown key "optimization.batch_size"'),
        ("epochs = ", "not valid TOML"),
        ("[data.more]\nx = 1", "unknown key"),
        ('epochs = "many"', "run.toml: \"epochs\" is 'many', which is text; a whole number is needed"),
        ("[data]\nbatch_size = 0", "run.toml: batch_size must be greater than 0 (got 0)"),
        ('[process_group]\nbackend = "ncl"', "run.toml: backend 'ncl' is unknown (did you mean \"nccl\"?)"),
        ('[telemetry]\ntrace_window = "a"', "run.toml: telemetry.trace_window a: expected whole numbers"),
    ],
)
def test_an_invalid_file_is_rejected_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(RequestError) as raised:
        toml_options(tmp_path / "run.toml", TrainConfig)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_choice_on_the_command_line_names_the_option_and_the_nearest_choice() -> None:
    result = CliRunner().invoke(command, ["--backend", "ncl"])
    assert "--backend 'ncl' is unknown (did you mean \"nccl\"?). Use one of auto, nccl" in str(
        result.exception
    )


def test_an_error_names_the_option_as_its_user_does() -> None:
    with pytest.raises(OptionError, match=r"^--batch-size must be greater than 0 \(got 0\)$") as raised:
        TrainConfig.of(batch_size=0)
    error = raised.value
    assert (error.option, error.value, error.reason) == ("batch_size", 0, "must be greater than 0")
    with naming(argument_names(TrainConfig)):
        with pytest.raises(OptionError, match=r"^batch_size must be greater than 0"):
            TrainConfig.of(batch_size=0)
        with pytest.raises(OptionError, match=r"^every_steps must be greater than 0"):
            TrainConfig.of(snapshot_every_steps=0)
        assert named("lr") == "lr"
    with pytest.raises(OptionError, match=r"^--nodes must be at least 1"):
        Job(num_nodes=0)


def test_an_empty_directory_is_reported_as_an_unset_variable() -> None:
    with pytest.raises(RequestError, match="--trace-dir is empty; give a directory"):
        configured("--trace-dir", "")
