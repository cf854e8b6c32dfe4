"""Renders job scripts from a job request and a site profile."""
