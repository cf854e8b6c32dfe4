"""Former names of modules that job scripts call, for scripts rendered before the modules moved."""
