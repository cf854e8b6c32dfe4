"""A real Slurm for the tests: namespaces as nodes, Debian's daemons on them."""
