"""The parts around the loop of `train.py`: options, ranks, tasks, wrappers, checkpoints, reports."""
