"""torchrun: its agents and their rendezvous, and its environment variables for other programs."""
