"""The sandbox for candidates' programs: bubblewrap, seccomp, cgroups, limits of memory and time."""
