"""Forecasts of a run before it is started; everything here but `measure.py` works without torch."""
