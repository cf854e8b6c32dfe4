"""The training engine: everything here may import torch."""
