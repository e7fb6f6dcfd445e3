"""What runs a whole batch for the caller: update, contrast, check."""
