"""Private names of DDP and FSDP2, under public ones. Seen in torch 2.9 to 2.15 unless a function says otherwise."""
