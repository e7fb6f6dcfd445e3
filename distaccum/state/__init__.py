"""Checkpoints: what a job needs beside its weights to resume, to the bit."""
