"""A stand-in for HPE PALS's mpiexec over MPICH's Hydra. What it does not do: ../README.md."""
