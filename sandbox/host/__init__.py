"""What every backend needs of this machine: paths, ids, run directories, cgroups, seccomp, child processes."""
