"""Templates of users: what they can use, and how broken, hostile or endless ones are stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import ROOT, run_cli

MINE = """\
{% extends "slurm.sh.j2" %}
{% block start %}
echo "mine, {{ job.num_nodes }} nodes of {{ site.title }}"
{{ super() }}
{%- endblock %}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def own(text: str, path: str = "mine.j2") -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


def refused(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        render(Job(template=own(text)), load_site("generic_slurm"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_template_can_extend_a_shipped_one_and_override_a_block(tmp_path: Path) -> None:
    own(MINE)
    done = run_cli("render", "--profile", "generic_slurm", "--template", "mine.j2", cwd=tmp_path)
    shipped = render(Job(), load_site("generic_slurm"))
    words = "--profile generic_slurm"
    changed = shipped.replace(words, f"{words} --template mine.j2").replace(
        '\ncd "${SLURM_SUBMIT_DIR', '\necho "mine, 1 nodes of any Slurm machine"\ncd "${SLURM_SUBMIT_DIR'
    )
    assert done.stdout.decode() == changed


def test_a_template_can_include_a_file_from_its_directory(tmp_path: Path) -> None:
    own("# {{ job.name }}\n", "site/part.j2")
    path = own('#!/bin/bash\n{% include "part.j2" %}', "site/mine.j2")
    assert render(Job(template=path), load_site("generic_slurm")) == "#!/bin/bash\n# ddp\n"


def test_a_template_with_a_shipped_name_can_extend_the_shipped_one() -> None:
    path = own(MINE, "slurm.sh.j2")
    assert "mine, 1 nodes" in render(Job(template=path), load_site("generic_slurm"))


def test_a_bare_name_is_found_in_the_users_template_directory() -> None:
    own(MINE, "config/ddp-hpc/templates/mine.j2")
    assert "mine, 1 nodes" in render(Job(template="mine.j2"), load_site("generic_slurm"))


@pytest.mark.parametrize("folder", ["here", "config/ddp-hpc/templates"])
def test_a_profile_can_name_a_template_in_its_or_the_users_directory(folder: str) -> None:
    own(MINE, f"{folder}/mine.j2")
    own('extends = "generic_slurm"\nowner = "me"\ntemplate = "mine.j2"\n', "here/mysite.toml")
    script = render(Job(), load_site("here/mysite.toml"))
    assert "mine, 1 nodes" in script
    assert "--template" not in script


@pytest.mark.parametrize("name", ["none.j2", "../mine.j2", "/etc/passwd", "a\nb", "..", "x" * 10_000])
def test_a_profile_with_a_template_elsewhere_is_refused(name: str) -> None:
    own(MINE)
    text = 'extends = "generic_slurm"\nowner = "me"\ntemplate = """' + name + '"""\n'
    with pytest.raises(RequestError, match=r"mysite.toml: template .* was not found in"):
        load_site(own(text, "here/mysite.toml"))


@pytest.mark.parametrize("path", ["none.j2", ".", "/dev/zero", "x/mine.j2", "a\0b", "x" * 10_000])
def test_a_template_that_is_not_a_file_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="template"):
        render(Job(template=path), load_site("generic_slurm"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/bash\n{{ jbo.name }}", "mine.j2:2: 'jbo' is undefined. Fix the template."),
        ("#!/bin/bash\n\n{% if %}", "mine.j2:3: Expected an expression"),
        ("#!/bin/bash\n{{ 1 / 0 }}", "mine.j2:2: division by zero"),
        (
            "#!/bin/bash\n{{ job.ranks_per_node | sh }}",
            "mine.j2:2: sh can only quote text and numbers, not None",
        ),
        ("#!/bin/bash\n{% include 'mine.j2' %}", "mine.j2:2: maximum recursion depth exceeded"),
        ("#!/bin/bash\n{% extends 'none.j2' %}", "mine.j2:2: none.j2 is neither a shipped template"),
        ("#!/bin/bash\n{% include '/etc/passwd' %}", "mine.j2:2: /etc/passwd is neither a shipped template"),
        ("#!/bin/bash\n{% include '../secret' %}", "mine.j2:2: ../secret is neither a shipped"),
        (
            "#!/bin/bash\n{{ job.__class__ }}",
            "mine.j2:2: access to attribute '__class__' of 'Job' object is unsafe",
        ),
        (
            "#!/bin/bash\n{{ exports.append(1) }}",
            "mine.j2:2: access to attribute 'append' of 'list' object is unsafe",
        ),
        ("echo no shebang", "mine.j2: the output of the template is not a job script"),
    ],
)
def test_a_broken_template_is_refused_in_one_line_with_its_number(text: str, said: str) -> None:
    own("SECRET", "../secret")
    assert refused(text).startswith(said)


def test_directive_values_are_checked_before_a_template_gets_them() -> None:
    path = own("#!/bin/bash\n#SBATCH -p {{ directives.queue }}\n")
    with pytest.raises(RequestError, match="queue"):
        render(Job(template=path, queue="x\n#SBATCH --uid=0"), load_site("generic_slurm"))


def test_the_page_documents_all_variables_of_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    given: set[str] = set()

    def seen(_name: str, names: dict[str, object]) -> str:
        given.update(names)
        return ""

    monkeypatch.setattr("ddp_hpc.render.render_script.render_shipped", seen)
    render(Job(), load_site("polaris"))
    page = (ROOT / "docs" / "how-to" / "write-a-template.md").read_text()
    table = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", table)) == given


def test_the_example_of_the_page_works() -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-template.md").read_text()
    (text,) = re.findall(r"```jinja\n(.*?)```", page, re.DOTALL)
    script = render(Job(template=own(text), num_nodes=2), load_site("perlmutter"))
    assert 'echo "job $SLURM_JOB_ID of ddp on 2 nodes" >>jobs.log\n' in script
