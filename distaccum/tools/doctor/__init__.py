"""What this machine, environment and job can run, by looking and by trying."""
