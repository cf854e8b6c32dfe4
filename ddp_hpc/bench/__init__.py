"""Benchmarks that return numbers, check the request before they start, and say on which machine they ran."""
