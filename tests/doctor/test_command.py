"""The command line of `ddp-hpc doctor`."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import Ended, Launch
from tests.waiting import wait_until

CHEAP = ("--only", "python", "--only", "shm", "--only", "open-files")


def doctor(launch: Launch, *args: str, cwd: Path, **env: str) -> Ended:
    return launch([sys.executable, "-m", "ddp_hpc", "doctor", *args], env=env, cwd=cwd)


def test_results_go_to_stdout_and_the_summary_to_stderr(launch: Launch, tmp_path: Path) -> None:
    ended = doctor(launch, *CHEAP, cwd=tmp_path)
    lines = ended.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["python", "open-files", "shm"]
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    assert ended.stderr.endswith(" fail\n")
    assert not list(tmp_path.iterdir())


def test_one_json_object(launch: Launch, tmp_path: Path) -> None:
    report = json.loads(doctor(launch, *CHEAP, "--json", cwd=tmp_path).stdout)
    assert report["num_nodes"] == 1
    assert [list(row) for row in report["results"]] == [["name", "status", "what", "remedy"]] * 3


def test_a_failure_is_exit_code_1(launch: Launch, tmp_path: Path) -> None:
    ended = doctor(launch, "--only", "tmp-space", cwd=tmp_path, TMPDIR=str(tmp_path / "none"))
    assert ended.stdout.startswith("fail  tmp-space  ")
    assert (ended.exit_code, ended.stderr) == (1, "0 ok, 0 warn, 1 fail\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "tourch"), 'did you mean "torch"'),
        (("--only", "shm", "--skip", "shm"), "together exclude all checks"),
        (("extra",), "unexpected extra argument"),
    ],
)
def test_an_invalid_request_is_exit_code_2(
    launch: Launch, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    ended = doctor(launch, *args, cwd=tmp_path)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert message in ended.stderr


def test_the_list_contains_all_checks_of_the_documentation(launch: Launch, tmp_path: Path) -> None:
    names = [line.split()[0] for line in doctor(launch, "--list", cwd=tmp_path).stdout.splitlines()]
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md").read_text(encoding="utf-8")
    assert names == [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")][: len(names)]


def test_all_checks_return_a_result_without_the_large_packages(launch: Launch, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in heavy: raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "heavy, found = ('torch', 'mpi4py', 'h5py', 'numpy'), u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name in heavy else found(name, package)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "sys.argv = ['ddp-hpc', 'doctor', '--json']\n"
        "from ddp_hpc.cli import main; main()\n"
    )
    ended = launch([sys.executable, "-c", program], cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads(ended.stdout)["results"]}
    assert not [row for row in rows.values() if "aborted" in row["what"]]
    for name in ("torch", "nccl", "mpi"):
        assert rows[name]["status"] == "warn"
        assert "not installed" in rows[name]["what"]


def test_ctrl_c_terminates_the_checks(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho $$ >pid\nexec /bin/sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    argv = [sys.executable, "-m", "ddp_hpc", "doctor", "--only", "gpus"]
    process = launch.start(argv, env={"PATH": str(tmp_path)}, cwd=tmp_path)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    process.send_signal(signal.SIGINT)
    ended = launch.end(process)
    assert (ended.exit_code, ended.stdout, ended.stderr.strip()) == (130, "", "interrupted")
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    wait_until(lambda: not status.exists() or status.read_text().split()[2] == "Z")
