"""Sets up torch's process group: devices, backends, stores and the placement of ranks."""
