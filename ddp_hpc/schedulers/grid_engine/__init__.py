"""Support for Altair Grid Engine, based on the user guides of sites, and never run on a real machine."""
