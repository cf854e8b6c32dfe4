"""How ranks share a training: one class per strategy. The loop depends only on `Strategy`."""
