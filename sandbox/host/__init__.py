"""Host utilities for all backends: paths, ids, run directories, cgroups, seccomp filters and child processes."""
