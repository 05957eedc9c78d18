"""Host utilities shared by all backends: paths, ids, run directories, cgroups, seccomp, child processes."""
