"""Trainers that own their loop, with an Accumulator inside."""
