"""Checks of the environment of a job, on one machine or on every node, each with a time limit."""
