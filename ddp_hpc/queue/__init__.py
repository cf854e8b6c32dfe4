"""Submits jobs, reports their status, shows their logs and cancels them. Runs on login nodes."""
