"""Reads data files, shuffles their samples and partitions them over ranks."""
