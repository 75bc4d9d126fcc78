"""Who runs in the next iteration. CPU only and without torch, so that it can be simulated."""
