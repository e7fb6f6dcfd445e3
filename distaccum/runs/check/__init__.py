"""check(): the one big batch against the accumulated one, and why they differ."""
