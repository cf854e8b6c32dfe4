"""Who am I among the ranks: found out on the compute node, before torch starts."""
