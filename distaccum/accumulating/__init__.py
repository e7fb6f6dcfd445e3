"""From options to a plan, and from a complete window to an update."""
