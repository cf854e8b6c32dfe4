"""The check of the nodes of a job before its ranks start: what each rank finds, and which nodes are bad."""
