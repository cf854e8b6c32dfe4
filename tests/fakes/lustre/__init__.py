"""A stand-in for Lustre's command lfs."""
