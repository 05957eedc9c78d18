"""Utilities for all backends on the host: paths, ids, run directories, cgroups, seccomp filters, child processes."""
