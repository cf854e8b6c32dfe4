"""A stand-in for Lustre's lfs."""
