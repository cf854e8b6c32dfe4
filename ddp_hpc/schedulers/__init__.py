"""The supported schedulers: their directives, their commands for jobs, and the output of these commands."""
