"""`ddp-hpc bench scaling`: its points are started here, or queued as jobs, and their numbers gathered."""
