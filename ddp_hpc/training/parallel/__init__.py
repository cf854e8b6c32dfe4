"""How ranks share a training: a class per strategy. The loop knows `Strategy` alone."""
