"""What a run will do, before it is started; everything here but `measure.py` works without torch."""
