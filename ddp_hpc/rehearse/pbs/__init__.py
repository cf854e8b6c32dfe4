"""A stand-in for OpenPBS: one folder, no daemons, the jobs run here. What it does not: docs/rehearse.md."""
