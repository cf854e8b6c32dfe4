"""The training engine. All modules of this package may import torch."""
