"""Forecasts of a run before it starts; everything here but `fitting.py` works without torch."""
