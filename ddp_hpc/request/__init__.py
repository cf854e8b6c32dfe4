"""Job requests, and the layout of a job's ranks on the nodes of a site."""
