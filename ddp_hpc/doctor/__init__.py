"""Is this environment fit for a job: checks that end in time, on one machine or on every node of a job."""
