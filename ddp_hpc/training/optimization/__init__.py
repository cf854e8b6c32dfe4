"""Optimizers, precision, gradient norms and torch.compile."""
