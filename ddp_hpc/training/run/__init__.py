"""One run, which can continue over several jobs. Each module answers one question:

- `directories`: where the run is kept.
- `record`: what is recorded on disk about the state of the run.
- `resumable`: whether this run can resume from a snapshot, and what has changed since.
- `restore`: restores the newest snapshot that is not damaged.
- `save_schedule`: when a snapshot is due, and what all ranks decide after a step.
- `stop_protocol`, `stop_requests`: who asked the run to stop, and when it must have stopped.
- `last_resort`: what ends a process that does not stop in time.
- `verdict`: what an error means: the cause of the end, the exit code and the message.
- `end`: how a process of the run ends: the report, the snapshot, the other ranks.
- `lifecycle`: resumes, saves and finishes the run on all ranks, with the answers of the other modules.
"""
