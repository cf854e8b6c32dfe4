"""One run, which can continue over several jobs. Each module answers one question:

- `directories`: where the run is kept.
- `record`: what is recorded on disk about the state of the run.
- `resumable`: whether this run can resume from a snapshot, and what has changed since.
- `save_schedule`: when a snapshot is due, and what all ranks decide after a step.
- `stop_requests`: who asked the run to stop, and when it must have stopped.
- `end`: how a process of the run ends: the report, the exit code, the other ranks.
- `lifecycle`: resumes, saves and finishes the run on all ranks, with the answers of the other modules.
"""
