"""Planning without a GPU: the paper's speed-up formula, and a simulator of one engine or a fleet. No torch."""
