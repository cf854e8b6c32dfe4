"""Launches commands in the current allocation or on this machine."""
