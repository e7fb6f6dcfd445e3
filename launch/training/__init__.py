"""What `train.py` needs around its loop: options, ranks, tasks, wrappers, checkpoints, reports."""
