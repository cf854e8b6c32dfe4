"""Sites: the facts of one machine, read from a profile, and the detection of the site of this machine."""
