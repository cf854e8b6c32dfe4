"""A stand-in for OpenPBS: one directory, no daemons. Its limits: docs/how-to/rehearse.md."""
