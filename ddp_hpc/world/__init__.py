"""Modules that job scripts of version 0.1 run, under their names in that version."""
