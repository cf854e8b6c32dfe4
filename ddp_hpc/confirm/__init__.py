"""Comparing a profile with the machine: a script that a user runs there, and its answers."""
