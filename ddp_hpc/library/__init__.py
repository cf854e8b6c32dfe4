"""ddp-hpc in someone's own script: what `import ddp_hpc` offers by name. docs/library.md shows all of it."""
