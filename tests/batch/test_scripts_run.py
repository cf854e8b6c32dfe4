"""Rendered scripts, run with stand-ins for the launchers."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddp_hpc.render.render_script import render, render_step
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox

MODULES = "module() { :; }\nconda() { :; }\nexport -f module conda\n"


def script(profile: str, **job: object) -> str:
    return render(Job(**{"name": "ddp", **job}), load_site(profile))  # type: ignore[arg-type]


def pbs(sandbox: Sandbox, *hosts: str, **extra: str) -> dict[str, str]:
    """The environment of a PBS job whose nodefile has these lines."""
    nodefile = sandbox.folder / "nodefile"
    nodefile.write_text("".join(f"{host}\n" for host in hosts))
    # The module command, which `#!/bin/bash -l` would define.
    setup = sandbox.folder / "modules.sh"
    setup.write_text(MODULES)
    given = {"PBS_O_WORKDIR": str(sandbox.work), "PBS_NODEFILE": str(nodefile), "PBS_JOBID": "12.pbs-srv"}
    return {**given, "BASH_ENV": str(setup), **extra}


def slurm(sandbox: Sandbox, num_nodes: int, **extra: str) -> dict[str, str]:
    return {"SLURM_SUBMIT_DIR": str(sandbox.work), "SLURM_JOB_NUM_NODES": str(num_nodes), **extra}


def test_pals_gets_the_same_ranks_for_repeated_hosts_in_the_nodefile(
    sandbox: Sandbox,
) -> None:
    sandbox.launcher("mpiexec", version="PALS")
    done = sandbox.run(script("polaris", num_nodes=2), **pbs(sandbox, "a", "a", "b", "b"))
    assert done.returncode == 0, done.stderr
    options = ["-n", "8", "--ppn", "4", "--cpu-bind", "list:24-31:16-23:8-15:0-7"]
    assert sandbox.words() == [*options, "python", "-m", "ddp_hpc.train"]


def test_the_network_settings_are_only_set_on_several_nodes(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", version="PALS")
    text = script("polaris", num_nodes=2)
    sandbox.run(text, **pbs(sandbox, "a", "b"))
    assert sandbox.seen()["NCCL_NET"] == "AWS Libfabric"
    sandbox.run(text, **pbs(sandbox, "a", "a", PBS_JOBID="13.pbs-srv"))
    assert "NCCL_NET" not in sandbox.seen()


def test_ranks_see_the_variables_that_the_trainer_needs(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", version="PALS")
    before = time.time()
    sandbox.run(script("polaris", walltime_s=600), **pbs(sandbox, "a", OMP_NUM_THREADS="64"))
    seen = sandbox.seen()
    assert seen["DDP_HPC_PROFILE"] == "polaris"
    assert seen["DDP_HPC_FABRIC_SUFFIX"] == ".hsn.cm.polaris.alcf.anl.gov"
    assert seen["DDP_HPC_KILL_DELAY_S"] == "7"  # 3 s of the 10 s are for requesting the next job
    assert seen["DDP_HPC_RUN_DIR"] == f"{sandbox.work}/runs/ddp"
    assert before + 590 <= int(seen["DDP_HPC_DEADLINE"]) <= time.time() + 600
    assert seen["OMP_NUM_THREADS"] == "8"
    assert "*.polaris.alcf.anl.gov" in seen["no_proxy"]


def test_compiled_kernels_are_kept_in_a_private_directory(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    (sandbox.folder / "planted").mkdir()
    linked, new = sandbox.folder / "linked", sandbox.folder / "new"
    linked.symlink_to(sandbox.folder / "planted")
    folders = {"TRITON_CACHE_DIR": str(linked), "TORCHINDUCTOR_CACHE_DIR": str(new)}
    done = sandbox.run(script("generic_slurm"), **slurm(sandbox, 1, TMPDIR=str(sandbox.folder), **folders))
    assert done.returncode == 0, done.stderr
    seen = sandbox.seen()
    assert seen["TORCHINDUCTOR_CACHE_DIR"] == str(new)
    assert seen["TRITON_CACHE_DIR"] != str(linked)
    for name in folders:
        assert Path(seen[name]).stat().st_mode & 0o777 == 0o700


def test_modules_and_conda_of_setup_are_loaded_before_the_virtual_environment(sandbox: Sandbox) -> None:
    """A module that is loaded afterwards would put its own python in front of that of .venv."""
    module = sandbox.folder / "module"
    sandbox.program("python", "#!/bin/bash\necho python of the module; exit 9\n", module)
    venv = sandbox.work / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f'export VIRTUAL_ENV={venv} PATH="{venv}/bin:$PATH"\n')
    (sandbox.bin / "python").rename(venv / "bin" / "python")
    sandbox.launcher("srun")
    setup = (f'export PATH="{module}:$PATH" CONDA_DEFAULT_ENV=base',)
    done = sandbox.run(script("generic_slurm", setup=setup), **slurm(sandbox, 1))
    assert done.returncode == 0, done.stdout
    assert sandbox.seen()["PATH"].startswith(f"{venv}/bin:{module}:")


def test_the_environment_of_the_submitting_shell_comes_before_the_modules_of_the_job(
    sandbox: Sandbox,
) -> None:
    """sbatch passes VIRTUAL_ENV and PATH on; a module that the job loads comes before both."""
    module, venv = sandbox.folder / "module", sandbox.folder / "mine"
    sandbox.program("python", "#!/bin/bash\necho python of the module; exit 9\n", module)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f'export VIRTUAL_ENV={venv} PATH="{venv}/bin:$PATH"\n')
    (sandbox.bin / "python").rename(venv / "bin" / "python")
    sandbox.launcher("srun")
    shell = {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{sandbox.bin}:/usr/bin:/bin"}
    text = script("generic_slurm", setup=(f'export PATH="{module}:$PATH"',))
    done = sandbox.run(text, **slurm(sandbox, 1, **shell))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("given", "seen"), [("/var/tmp/pbs.1.x", "/var/tmp/pbs.1.x"), ("/v" * 30, "/tmp")])
def test_a_tmpdir_too_long_for_sockets_becomes_tmp(sandbox: Sandbox, given: str, seen: str) -> None:
    sandbox.launcher("mpiexec", version="PALS")
    sandbox.run(script("generic_pbs"), **pbs(sandbox, "a", TMPDIR=given))
    assert sandbox.seen()["TMPDIR"] == seen


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("HYDRA build details:", ["-ppn", "2"]),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", ["-ppn", "2"]),
        ("mpiexec version 1.3.2 revision 0", ["--ppn", "2"]),
    ],
)
def test_a_generic_script_detects_the_kind_of_mpiexec(
    sandbox: Sandbox, version: str, options: list[str]
) -> None:
    sandbox.launcher("mpiexec", version=version)
    sandbox.run(script("generic_pbs", ranks_per_node=2), **pbs(sandbox, "a", "a", "b", "b"))
    assert sandbox.words()[:-3] == ["-n", "4", *options]


def test_open_mpi_gets_the_names_of_the_variables_to_pass_on(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", version="mpiexec (Open MPI) 5.0.11")
    job = script("generic_pbs", ranks_per_node=2, env={"GREETING": "hello"})
    sandbox.run(job, **pbs(sandbox, "a", "a", "b", "b"))
    words = sandbox.words()
    assert words[:6] == ["-n", "4", "--map-by", "ppr:2:node", "--bind-to", "none"]
    handed_on = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert {"PATH", "DDP_HPC_DEADLINE", "OMP_NUM_THREADS", "GREETING"} <= handed_on
    assert "LD_LIBRARY_PATH" not in handed_on  # unset, so Open MPI would warn


def test_the_mpiexec_of_a_virtual_environment_is_used_if_there_is_no_other(sandbox: Sandbox) -> None:
    venv = sandbox.work / ".venv"
    sandbox.launcher("mpiexec", folder=venv / "bin")
    (sandbox.bin / "python").rename(venv / "bin" / "python")
    (venv / "bin" / "activate").write_text(f'export VIRTUAL_ENV={venv} PATH="{venv}/bin:/usr/bin:/bin"\n')
    done = sandbox.run(script("generic_pbs"), **pbs(sandbox, "a"))
    assert f": {venv}/bin/mpiexec -n " in done.stdout.decode()


def test_the_mpiexec_of_pbs_is_refused(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", version_code=1)
    done = sandbox.run(script("generic_pbs"), **pbs(sandbox, "a", PATH=f"{sandbox.bin}:/bin"))
    assert done.returncode == 2
    assert (
        done.stderr.decode()
        .splitlines()[-1]
        .startswith("error: no mpiexec of an MPI library found on the PATH")
    )
    assert not sandbox.record.exists()


def test_srun_gets_the_options_that_it_does_not_inherit_from_sbatch(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    job = script("generic_slurm", num_nodes=2, ranks_per_node=2, cpus_per_node=8, mpi="pmi2")
    sandbox.run(job, **slurm(sandbox, 2))
    tasks = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=4"]
    assert sandbox.words() == [*tasks, "--kill-on-bad-exit=1", "--mpi=pmi2", "python", "-m", "ddp_hpc.train"]


def test_torchrun_has_one_agent_per_node(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    step = sandbox.program("torchrun_script.sh", render_step(), sandbox.work)
    job = script("generic_slurm", num_nodes=2, ranks_per_node=4, cpus_per_node=8, launcher="torchrun")
    done = sandbox.run(job, **slurm(sandbox, 2))
    assert done.returncode == 0, done.stderr
    tasks = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"]
    assert sandbox.words() == [*tasks, "--kill-on-bad-exit=1", str(step), "python", "-m", "ddp_hpc.train"]
    assert sandbox.seen()["DDP_HPC_RANKS_PER_NODE"] == "4"


def test_with_spare_nodes_the_job_survives_the_loss_of_a_node_but_its_ranks_do_not(sandbox: Sandbox) -> None:
    """Otherwise, the ranks on the other nodes would wait in a collective."""
    sandbox.launcher("srun")
    job = script("generic_slurm", num_nodes=2, spare_nodes=1, node_check="off")
    assert "\n#SBATCH --no-kill\n" in job
    done = sandbox.run(job, **slurm(sandbox, 3, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-3]"))
    assert done.returncode == 0, done.stderr
    words = sandbox.words()
    assert {"--nodelist=n1,n2", "--nodes=2", "--kill-on-bad-exit=1"} <= set(words)
    assert "--no-kill" not in words


def test_a_signal_is_forwarded_to_the_launcher_and_its_exit_code_is_returned(sandbox: Sandbox) -> None:
    # It stops after half a second with a specific exit code.
    then = """trap 'sleep 0.5; echo saved >saved; exit 75' TERM
echo up >up
while :; do sleep 0.05; done"""
    sandbox.launcher("srun", then=then)
    path = sandbox.write(script("generic_slurm"))
    environ = sandbox.environ(**slurm(sandbox, 1))
    with subprocess.Popen(["bash", path], cwd=sandbox.work, env=environ, stdout=subprocess.PIPE) as process:
        _wait_for(sandbox.work / "up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 75
    assert (sandbox.work / "saved").exists()


def test_ranks_of_srun_get_term_from_scancel(sandbox: Sandbox) -> None:
    then = """trap 'touch killed; exit 137' TERM
trap 'exit 75' USR1
echo $$ >rank.tmp; mv rank.tmp rank
while :; do sleep 0.05; done"""
    sandbox.launcher("srun", then=then)
    sandbox.program("scancel", '#!/bin/bash\necho "$*" >scancelled; kill -USR1 "$(cat rank)"\n')
    path = sandbox.write(script("generic_slurm"))
    environ = sandbox.environ(**slurm(sandbox, 1, SLURM_JOB_ID="7"))
    with subprocess.Popen(["bash", path], cwd=sandbox.work, env=environ, stdout=subprocess.PIPE) as process:
        _wait_for(sandbox.work / "rank")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 75
    assert (sandbox.work / "scancelled").read_text() == "--signal=TERM 7\n"
    assert not (sandbox.work / "killed").exists()


def test_the_local_job_runs_its_ranks_here(sandbox: Sandbox) -> None:
    ranks = 'while [[ $1 == -* ]]; do shift 2; done\nfor rank in 0 1; do echo "rank $rank: $*"; done'
    mpiexec = sandbox.launcher("mpiexec", then=ranks)
    text = script("local", ranks_per_node=2, command=("python", "train.py", "a b"))
    done = sandbox.run(text, DDP_HPC_MPIEXEC=str(mpiexec))
    assert done.returncode == 0, done.stderr
    *options, ddp_hpc, word, dashes = sandbox.words()[:-3]
    assert (*options, word, dashes) == ("-n", "2", "-ppn", "2", "exec", "--")
    assert sandbox.words()[-3:] == ["python", "train.py", "a b"]
    first, *others = done.stdout.decode().splitlines()
    assert first.endswith(f": {mpiexec} -n 2 -ppn 2 {ddp_hpc} exec -- python train.py 'a b'")
    assert others == [f"rank {rank}: {ddp_hpc} exec -- python train.py a b" for rank in (0, 1)]
    assert sandbox.seen()["DDP_HPC_LAUNCH"]


@pytest.mark.parametrize(
    ("command", "job", "uses"),
    [
        (("python", "train.py"), {}, True),
        (("/opt/python3.12", "-u", "-X", "dev", "-m", "my.training", "-m", "ddp_hpc"), {}, True),
        (("./train.py",), {}, True),
        (("python", "train.py"), {"env_style": "none"}, False),
        (("python", "train.py"), {"launcher": "torchrun"}, False),
        (("python", "-u", "-m", "ddp_hpc.train"), {}, False),
        (("python", "-m", "data_gen"), {}, False),
        (("python", "-m", "torch.distributed.run", "train.py"), {}, False),
        (("./lammps", "-in", "x.py"), {}, False),
    ],
)
def test_python_programs_get_their_rank_from_ddp_hpc_exec(
    command: tuple[str, ...], job: dict[str, object], uses: bool
) -> None:
    text = script("generic_slurm", num_nodes=2, command=command, **job)
    assert (f"ddp-hpc exec -- {command[0]}" in text) == uses


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came; {list(path.parent.iterdir())}"
        time.sleep(0.02)
