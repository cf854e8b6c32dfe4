"""Modules for programs with a training loop of another library. Each is imported only when it is used."""
