"""Several gateway processes on one port, seen from outside as one."""
