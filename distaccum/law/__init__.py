"""The arithmetic and the words of a window: no torch.distributed."""
