"""Options of the configuration on the command line, in TOML files and in run directories."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import as_toml, to_options, toml_defaults
from ddp_hpc.train import command
from ddp_hpc.training.config import TrainConfig


def test_every_option_of_the_configuration_is_on_the_command_line() -> None:
    on_command_line = {parameter.name for parameter in command.params}
    assert on_command_line - {"config", "version"} == {*to_options(TrainConfig())}


def test_the_command_line_has_the_defaults_of_the_configuration() -> None:
    context = command.make_context("train", [])
    assert TrainConfig.of(**context.params) == TrainConfig()


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
    context = command.make_context("train", ["--config", str(tmp_path / "run.toml")])
    assert TrainConfig.of(**context.params) == config


def test_the_command_line_takes_precedence_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "epochs = 3\n[optimization]\nlr = 0.5\naccumulate = 2\n[data]\nbatch-size = 8\nshuffle = false\n"
    )
    context = command.make_context("train", ["--lr", "0.25", "--config", str(file)])
    config = TrainConfig.of(**context.params)
    assert (config.epochs, config.optimization.lr, config.optimization.accumulate) == (3, 0.25, 2)
    assert (config.data.batch_size, config.data.shuffle) == (8, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs = 3", "unknown key 'epohcs' (did you mean \"epochs\"?)"),
        ("[optimization]\nbatch-size = 3", "unknown key 'optimization.batch-size'"),
        ("epochs = ", "not valid TOML"),
        ("[data.more]\nx = 1", "unknown key"),
    ],
)
def test_an_invalid_file_is_rejected_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(RequestError) as raised:
        toml_defaults(tmp_path / "run.toml", TrainConfig)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        toml_defaults(tmp_path / "no.toml", TrainConfig)


def test_a_value_of_the_wrong_type_in_a_file_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('epochs = "many"')
    done = CliRunner().invoke(command, ["--config", str(tmp_path / "run.toml")])
    assert done.exit_code == 2
    assert "--epochs" in done.output
