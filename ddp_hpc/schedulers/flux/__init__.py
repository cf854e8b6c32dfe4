"""Flux. The scripts follow the guides of the sites; none has been run on a Flux machine."""
