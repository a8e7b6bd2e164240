"""Many runs: on this machine or on a Ray cluster, within a budget, with progress."""
