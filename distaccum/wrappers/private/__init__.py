"""Private names of the wrappers, a file each; `engines/private` says for which versions."""
