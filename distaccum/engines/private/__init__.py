"""The only modules of the engines that use private names of other libraries, a file per library or wrapper.

Unless a function says otherwise, its names were seen in torch 2.9 to 2.15, DeepSpeed 0.18 to 0.19.8 and Accelerate 1.11
to 1.15.
"""
