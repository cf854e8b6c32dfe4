"""A real Slurm cluster for the tests: Debian's daemons, with Linux namespaces as nodes."""
