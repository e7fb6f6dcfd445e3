"""The micro-batches of one update, as a transaction."""
