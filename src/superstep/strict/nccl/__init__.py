"""NCCL emulated: a process group, its communicators, their transport and watchdog."""
