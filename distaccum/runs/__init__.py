"""Calls that run a whole batch for the caller: update, contrast, check."""
