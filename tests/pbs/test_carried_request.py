"""What a successor takes from the attributes of its job. The texts are those of an OpenPBS 23.06."""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers.pbs import carried_request as carried
from ddp_hpc.schedulers.pbs.query_and_cancel import attributes_in

# qsub -l select=1:ncpus=1 -l walltime=30 -o out.log -e /scratch/pb/err.log -m abe -M a@b.c,d@e -S /bin/bash
#      -W umask=027,sandbox=PRIVATE -W group_list=sci -r n -p -5 -N nm1 -P proj -A acc -k oe -u sci -c n v.sh
ALL_OPTIONS = """Job Id: 9.srv
    Job_Name = nm1
    Job_Owner = sci@srv.pbs.lab
    job_state = R
    queue = workq
    Account_Name = acc
    Checkpoint = n
    Error_Path = srv.pbs.lab:/scratch/pb/err.log
    group_list = sci
    Hold_Types = n
    Join_Path = n
    Keep_Files = oe
    Mail_Points = abe
    Mail_Users = a@b.c,d@e
    Output_Path = srv.pbs.lab:/scratch/pb/out.log
    Priority = -5
    Rerunable = False
    Resource_List.ncpus = 1
    Resource_List.nodect = 1
    Resource_List.place = pack
    Resource_List.select = 1:ncpus=1
    Resource_List.walltime = 00:00:30
    Shell_Path_List = /bin/bash
    sandbox = PRIVATE
    substate = 41
    User_List = sci
    umask = 27
    run_count = 3
    Submit_arguments = -l select=1:ncpus=1 -l walltime=30 -o out.log -e /scratch/p
\tb/err.log -m abe -M a@b.c,d@e -S /bin/bash -W umask=027,sandbox=PRIVATE -W
\tgroup_list=sci -r n -p -5 -N nm1 -P proj -A acc -k oe -u sci -c n v.sh
    project = proj
    Submit_Host = srv.pbs.lab
"""
# qsub v.sh
NO_OPTIONS = """Job Id: 12.srv
    Job_Name = v.sh
    Checkpoint = u
    Error_Path = srv.pbs.lab:/scratch/pb/v.sh.e12
    Join_Path = n
    Keep_Files = n
    Mail_Points = a
    Output_Path = srv.pbs.lab:/scratch/pb/v.sh.o12
    Priority = 0
    Rerunable = True
    Resource_List.ncpus = 1
    Resource_List.select = 1:ncpus=1
    Submit_arguments = v.sh
    project = _pbs_project_default
"""
# WB is x\y, and WG has two lines.
VARIABLES = r"""Job Id: 8.srv
    Variable_List = PBS_O_HOME=/home/sci,PBS_O_LANG=C.UTF-8,PBS_O_SHELL=/bin/bash,
	PBS_O_INTERACTIVE_ENCRYPT_METHOD=,PBS_O_WORKDIR=/scratch/pb,
	WA=a\,b,WB=x\\y,WC=it\'s,WD=say \"hi\",WE=005,WF=,WG=line1\nline2,WH=a=b,WI=1e3,WJ=ü é,
	WL=$HOME,WN=  lead,DDP_HPC_ATTEMPT=2,PBS_O_QUEUE=workq,PBS_O_HOST=srv.pbs.lab
"""


def test_all_options_of_qsub_are_passed_on() -> None:
    given = attributes_in(ALL_OPTIONS)
    assert " ".join(carried.options(given, "/scratch/pb")) == (
        "-N nm1 -A acc -P proj -p -5 -k oe -m abe -M a@b.c,d@e -S /bin/bash -u sci -c n -r n "
        "-o /scratch/pb/out.log -e /scratch/pb/err.log -W group_list=sci -W umask=027 -W sandbox=PRIVATE"
    )
    assert [*carried.resources(given, "")] == ["-l", "select=1:ncpus=1", "-l", "walltime=00:00:30"]


def test_defaults_are_not_passed_on() -> None:
    given = attributes_in(NO_OPTIONS)
    assert carried.options(given, "/scratch/pb") == ["-N", "v.sh"]
    assert [*carried.resources(given, "")] == []
    assert [*carried.resources(given, "#PBS -l select=1\n")] == ["-l", "select=1:ncpus=1"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/scratch/pb/arr.o53.^array_index^", []),
        ("/scratch/pb/arr.o53.2", []),
        ("/scratch/logs/", ["-o", "/scratch/logs/"]),
        ("/scratch/pb/arr.out", ["-o", "/scratch/pb/arr.out"]),
        ("/scratch/other/arr.o53", ["-o", "/scratch/other/arr.o53"]),
    ],
)
def test_a_log_is_passed_on_unless_its_name_is_that_of_the_job(path: str, expected: list[str]) -> None:
    given = {"Job_Name": "arr", "Output_Path": f"srv:{path}"}
    assert carried.options(given, "/scratch/pb")[2:] == expected


def test_the_variables_of_qsub_are_read_as_pbs_writes_them() -> None:
    found = carried.variables(attributes_in(VARIABLES))
    assert found == {
        "WA": "a,b",
        "WB": "x\\y",
        "WC": "it's",
        "WD": 'say "hi"',
        "WE": "005",
        "WF": "",
        "WG": "line1\nline2",
        "WH": "a=b",
        "WI": "1e3",
        "WJ": "\u00fc \u00e9",
        "WL": "$HOME",
        "WN": "  lead",
    }
    # qsub would pass these on with another value; the successor gets them from its script alone.
    assert set(found) - set(carried.safe_names(found)) == {"WB", "WC", "WD", "WG"}


@pytest.mark.parametrize(
    ("arguments", "script", "expected"),
    [
        ("-V job.sh", "", True),
        ("-l select=1 -N x -V job.sh", "", True),
        ("-v A=-V job.sh", "", False),
        ("job.sh", "#PBS -V\n", True),
        ("job.sh", "#PBS -N x -V\n", True),
        ("job.sh", "#PBS -v A\n# -V\n", False),
    ],
)
def test_whether_the_environment_was_passed(arguments: str, script: str, expected: bool) -> None:
    assert carried.passes_environment({"Submit_arguments": arguments}, script) is expected


def test_a_variable_that_bash_cannot_export_is_refused() -> None:
    carried.check_names(["LR", "_x1"])
    with pytest.raises(RequestError, match=r"qsub -v has passed the variable 'a\.b' to this job"):
        carried.check_names(["a.b"])
