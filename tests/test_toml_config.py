"""Reading TOML into frozen dataclasses: every error has a file and a key."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.toml_config import read_toml


@dataclass(frozen=True, kw_only=True)
class Queue:
    name: str
    max_nodes: int = 0

    def __post_init__(self) -> None:
        if self.max_nodes < 0:
            raise RequestError(f"max_nodes is {self.max_nodes}; 0 or more is needed")


@dataclass(frozen=True, kw_only=True)
class Machine:
    title: str
    ratio: float = 1.0
    shared: bool = False
    hosts: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    queues: tuple[Queue, ...] = ()
    default: Queue | None = None
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)


def parse(text: str) -> Machine:
    with TemporaryDirectory() as directory, chdir(directory):
        Path("m.toml").write_text(text, encoding="utf-8")
        return read_toml(Path("m.toml"), Machine)


def test_tables_become_nested_dataclasses() -> None:
    machine = parse(
        """
title = "big"
ratio = 2
hosts = ["a", "b"]
default = { name = "q" }
paths.LIB = ["/x"]
[env]
A = "1"
[[queues]]
name = "one"
[[queues]]
name = "two"
max_nodes = 4
"""
    )
    assert machine == Machine(
        title="big", ratio=2.0, hosts=("a", "b"), env={"A": "1"}, default=Queue(name="q"),
        queues=(Queue(name="one"), Queue(name="two", max_nodes=4)), paths={"LIB": ("/x",)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('title = "a"\nhots = []', 'm.toml: unknown key "hots" (did you mean "hosts"?)'),
        ('title = "a"\nxyzzy = 1', 'm.toml: unknown key "xyzzy"; known keys: title, ratio, '),
        ('title = "a"\n[[queues]]\nname = "x"\n[[queues]]\nmax_node = 3\nname = "y"',
         'm.toml: [queues.1] unknown key "max_node"'),
        ('title = 3', 'm.toml: "title" is 3, which is a whole number; text is needed'),
        ('title = "a"\nshared = 1', '"shared" is 1, which is a whole number; true or false is needed'),
        ('title = "a"\nratio = true', '"ratio" is True, which is true or false; a number is needed'),
        ('title = "a"\nhosts = [\n  "b",\n  3,\n]', 'm.toml: "hosts.1" is 3'),
        ('title = "a"\n[env]\nA = 1', 'm.toml: "env.A" is 1, which is a whole number; text is needed'),
        ('title = "a"\ndefault = "q"', '"default" is \'q\', which is text; a table is needed'),
        ("ratio = 1.0", 'm.toml: the key "title" is missing; add it'),
        ('title = "a"\n[[queues]]\nname = "q"\nmax_nodes = -1',
         "m.toml: [queues.0] max_nodes is -1; 0 or more is needed"),
        ('title = "a', "m.toml: is not valid TOML: "),
    ],
)  # fmt: skip
def test_an_error_contains_the_key_the_value_and_the_needed_type(text: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_table_of_a_file_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('whatever = 1\n[default]\nname = "q"\n')
    assert read_toml(path, Queue, table="default") == Queue(name="q")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_bytes(b'title = "\xff\xfe"')
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        read_toml(path, Machine)


def test_a_directory_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_toml(tmp_path, Machine)
