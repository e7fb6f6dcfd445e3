"""Observers of windows, one per file; a window without observers runs none of them."""
