"""Support for Flux, based on the user guides of sites, and never run on a real Flux machine."""
