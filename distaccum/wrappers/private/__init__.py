"""Private names, one file per wrapper; seen in torch 2.9 to 2.15, DeepSpeed 0.18 to 0.19.8, Accelerate 1.11 to 1.15."""
