"""Submit jobs, report their status, show their logs and cancel them. Runs on login nodes, without torch."""
