"""Names with an underscore of other libraries, a file per library or wrapper. Engines use DDP's reducer and FSDP2's
internal objects, which these files hand out, by names without one.

Unless a function says otherwise: seen in torch 2.9 to 2.15, DeepSpeed 0.18 to 0.19.8 and Accelerate 1.11 to 1.15.
"""
