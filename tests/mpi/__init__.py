"""Tests with real MPI ranks on this machine: MPICH's and Open MPI's wheels."""
