"""The rendezvous of the ranks with rank 0, and their authenticated key-value store for small messages."""
