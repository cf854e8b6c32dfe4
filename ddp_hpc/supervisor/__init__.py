"""The supervisor of a batch job: it starts the launcher on the first node and decides how the job ends."""
