"""The life of a job after its script is written: LOGIN NODE, stdlib and click alone."""
