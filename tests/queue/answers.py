"""Output of Slurm 22.05 and OpenPBS 23.06 from real clusters, with shortened paths and names."""

from __future__ import annotations

from typing import Any

from ddp_hpc.schedulers.job_state import JobState
from ddp_hpc.schedulers.slurm.query_and_cancel import parse_scontrol

_SLURM = (
    "JobId={job_id} JobName={name} UserId={user}(1000) GroupId=me(1000) MCS_label=N/A Priority=42949 Nice=0 "
    "Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=0 "
    "BatchFlag=1 Reboot=0 ExitCode={exit} RunTime={run_time} TimeLimit={limit} TimeMin=N/A "
    "SubmitTime=2026-11-21T16:12:27 EligibleTime=2026-11-21T16:12:27 AccrueTime=2026-11-21T16:12:27 "
    "StartTime={start} EndTime=2026-11-21T16:12:30 Deadline=N/A PreemptEligibleTime=2026-11-21T16:12:29 "
    "PreemptTime=None SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-21T16:12:29 Scheduler=Backfill "
    "Partition=debug AllocNode:Sid=head:0 ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} "
    "BatchHost=n1 NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,mem=400M,node=2 "
    "Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryNode=200M MinTmpDiskNode=0 "
    "Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) "
    "Command={script} WorkDir={work} StdErr={log} StdIn=/dev/null StdOut={log} Power= \n"
)


def slurm(**changes: str) -> str:
    """Returns the output of `scontrol --oneliner show job 12`, with these fields changed. The job runs."""
    known = {
        "job_id": "12",
        "name": "ddp",
        "user": "me",
        "state": "RUNNING",
        "reason": "None",
        "exit": "0:0",
        "run_time": "00:10:00",
        "limit": "01:00:00",
        "start": "2026-11-21T16:12:29",
        "nodes": "n[1-2]",
        "script": "/w/job.sh",
        "work": "/w",
        "log": "/w/ddp-12.out",
    }
    return _SLURM.format(**{**known, **changes})


def slurm_job(text: str, job_id: str = "12") -> JobState:
    """Returns the only job in this output of scontrol."""
    [job] = parse_scontrol(text, job_id)
    return job


def qstat_text(jobs: dict[str, Any]) -> str:
    """Returns the output of `qstat -f` for jobs with these attributes, by their IDs."""
    lines = []
    for name, job in jobs.items():
        lines.append(f"Job Id: {name}")
        for key, value in job.items():
            if key == "Variable_List":
                value = ",".join(f"{variable}={text}" for variable, text in value.items())
            parts = value.items() if isinstance(value, dict) else [("", value)]
            lines += [f"    {key}.{part}".rstrip(".") + f" = {text}" for part, text in parts]
        lines.append("")
    return "\n".join(lines)


def pbs(**changes: Any) -> dict[str, Any]:
    """Returns the attributes of job 12 by its ID, with these attributes changed. The job runs.

    None removes an attribute.
    """
    job = {
        "Job_Name": "ddp",
        "Job_Owner": "me@pbs-login.pbs.lab",
        "resources_used": {"cput": "00:00:00", "mem": "1368kb", "ncpus": 8, "walltime": "00:10:00"},
        "job_state": "R",
        "queue": "debug",
        "server": "pbs-srv",
        "Account_Name": "proj",
        "ctime": "Sat Nov 21 01:36:05 2026",
        "Error_Path": "pbs-login.pbs.lab:/w/ddp.e12",
        "exec_host": "x3001c0s1b0n0/0*4+x3001c0s1b1n0/0*4",
        "Hold_Types": "n",
        "Join_Path": "oe",
        "Keep_Files": "doe",
        "Output_Path": "pbs-login.pbs.lab:/w/ddp.o12",
        "Resource_List": {"nodect": 2, "place": "free", "select": 1, "walltime": "01:00:00"},
        "stime": "Sat Nov 21 01:36:05 2026",
        "substate": 42,
        "Variable_List": {"PBS_O_HOME": "/home/me", "PBS_O_WORKDIR": "/w", "FOO": 5, "HUGE": 1e300},
        "comment": "Job run at Sat Nov 21 at 01:36 on (x3001c0s1b0n0:ncpus=4)+(x3001c0s1b1n0:ncpus=4)",
        "run_count": 1,
        "Submit_arguments": "-A proj -q debug 'my job.sh'",
        "project": "_pbs_project_default",
        **changes,
    }
    job = {key: value for key, value in job.items() if value is not None}
    return {"12.pbs-srv": job}


_ENDED = "Job run at Fri Nov 27 at 00:58 on (n1:ncpus=1) and"
# The attributes of an array that OpenPBS prints for a task of which it has no record.
NO_RECORD = {
    "Output_Path": "pbs-login.pbs.lab:/w/a.sh.o12.^array_index^",
    "Exit_status": 0,
    "substate": 70,
    "comment": "Job Array Began at Fri Nov 27 at 00:58",
    "exec_host": None,
    "resources_used": None,
    "run_count": None,
    "project": None,
    "Submit_arguments": "-J 1-9%2 a.sh",
}


def pbs_array() -> dict[str, Any]:
    """Returns the attributes of the array 12[] (qsub -J 1-9%2) and of its tasks, by their IDs.

    Task 1 is done, 2 has failed, 3 was deleted, 4 runs, 5 and 8 were deleted before their starts, and the
    others wait.
    """
    array = {
        "job_state": "B",
        "array": "True",
        "array_state_count": "Queued:3 Running:1 Exiting:0 Expired:5",
        "array_indices_submitted": "1-9",
        "array_indices_remaining": "6-7,9",
        "max_run_subjobs": 2,
    }
    tasks = [
        {"job_state": "X", "substate": 92, "Exit_status": 0, "comment": f"{_ENDED} finished"},
        {"job_state": "X", "substate": 93, "Exit_status": 3, "comment": f"{_ENDED} failed"},
        {"job_state": "X", "substate": 91, "Exit_status": 271, "comment": f"{_ENDED} terminated by me@n1"},
        {"job_state": "R", "exec_host": "n1/0"},
        {**NO_RECORD, "job_state": "X", "comment": "Subjob finished"},
        *[{**NO_RECORD, "job_state": "Q", "substate": 10}] * 2,
        {**NO_RECORD, "job_state": "X", "comment": "Subjob finished"},
        {**NO_RECORD, "job_state": "Q", "substate": 10},
    ]
    answer = {"12[].pbs-srv": pbs(**NO_RECORD, **array)["12.pbs-srv"]}
    for index, task in enumerate(tasks, start=1):
        started = {
            "array_id": "12[].pbs-srv",
            "array_index": index,
            "Output_Path": f"pbs-login.pbs.lab:/w/a.sh.o12.{index}",
            "Submit_arguments": None,
        }
        [job] = pbs(**{**({} if "run_count" in task else started), **task}).values()
        answer[f"12[{index}].pbs-srv"] = job
    return answer


# `qstat -xf` of a job that reached its walltime, with the line breaks of qstat.
PBS_TEXT = """\
Job Id: 67.pbs-srv
    Job_Name = ms2
    Job_Owner = pbsuser@pbs-login.pbs.lab
    resources_used.cput = 00:00:00
    resources_used.walltime = 00:00:37
    job_state = F
    queue = workq
    Error_Path = pbs-login.pbs.lab:/home/pbsuser/w/ms2.e67
    exec_host = x3001c0s1b0n0/0*64+x3001c0s1b1n0/0*64
    exec_vnode = (x3001c0s1b0n0:ncpus=64:ngpus=4)+(x3001c0s1b1n0:ncpus=64:ngpus
\t=4)
    Join_Path = n
    Keep_Files = doe
    Output_Path = pbs-login.pbs.lab:/home/pbsuser/w/ms2.o67
    Resource_List.select = 2:system=polaris
    Resource_List.walltime = 00:00:10
    stime = Sat Nov 21 02:02:45 2026
    substate = 93
    Variable_List = PBS_O_HOME=/home/pbsuser,PBS_O_LOGNAME=pbsuser,
\tPBS_O_PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games:/o
\tpt/pbs/bin,PBS_O_MAIL=/var/mail/pbsuser,PBS_O_SHELL=/bin/bash,
\tPBS_O_WORKDIR=/home/pbsuser/w,PBS_O_SYSTEM=Linux,PBS_O_QUEUE=workq
    comment = Job run at Sat Nov 21 at 02:02 on (x3001c0s1b0n0:ncpus=64:ngpus=4
\t)+(x3001c0s1b1n0:ncpus=64:ngpus=4) and exceeded resource walltime
    run_count = 1
    Exit_status = -29
    Submit_arguments = -A p -q workq -l filesystems=home:eagle -l select=2:syst
\tem=polaris -l place=scatter -N ms2 -l walltime=10 mpisig.sh
    project = _pbs_project_default
"""
