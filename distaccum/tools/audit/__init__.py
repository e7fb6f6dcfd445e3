"""`distaccum audit`: what the accumulation of an unchanged script does."""
