"""What every other package may use: errors, options, files, processes, units and text."""
