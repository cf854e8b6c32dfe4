"""Altair Grid Engine. Scripts are rendered from the sites' guides; none has been run."""
