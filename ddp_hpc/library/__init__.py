"""The public Python API of `import ddp_hpc`, for users' scripts: docs/how-to/use-the-library.md."""
