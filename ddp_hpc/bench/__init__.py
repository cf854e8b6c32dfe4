"""Benchmarks of data loading, communication and scaling."""
