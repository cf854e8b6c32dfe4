"""A stand-in for OpenPBS in one directory, without daemons. docs/how-to/rehearse.md lists its limits."""
