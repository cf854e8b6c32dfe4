"""Support for IBM Spectrum LSF, based on its manual and public scripts, and never run on a real cluster."""
