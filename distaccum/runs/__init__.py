"""Runs of a whole batch for the caller: update, contrast, check."""
