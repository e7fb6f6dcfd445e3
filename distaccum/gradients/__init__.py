"""Tensors and gradients: nothing here knows of windows or ranks."""
