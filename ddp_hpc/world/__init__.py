"""Old names of modules, for job scripts that were rendered by version 0.1."""
