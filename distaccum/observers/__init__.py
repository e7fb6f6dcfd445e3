"""What listens to windows: each is a file, and a window without any never enters one."""
