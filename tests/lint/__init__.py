"""Tests of `ddp-hpc lint` on scripts in the manner of public ones."""
