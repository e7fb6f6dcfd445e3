"""check(): compares the big batch with the accumulated one, and explains a difference."""
