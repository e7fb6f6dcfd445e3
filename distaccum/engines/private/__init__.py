"""Private names of DDP and FSDP2, without an underscore. Seen in torch 2.9 to 2.15 unless a function differs."""
