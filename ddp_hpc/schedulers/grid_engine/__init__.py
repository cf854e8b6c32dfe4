"""Altair Grid Engine. The scripts follow the guides of the sites; none has been run on a real machine."""
