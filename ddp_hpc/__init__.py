"""PyTorch jobs on PBS and Slurm machines. Importing this package costs nothing and changes nothing."""

__version__ = "0.1.0"
