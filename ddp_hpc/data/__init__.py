"""Reading data files: what is in them, the order of samples, and which rank takes which."""
