"""The command line and its commands; nothing below imports it."""
