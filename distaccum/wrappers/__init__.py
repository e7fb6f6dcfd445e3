"""Engines and adapters for the wrappers of other packages, and for FSDP1."""
