"""Rendering of job scripts from a job and a site."""
