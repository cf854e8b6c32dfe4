"""Estimates for planning a job."""
