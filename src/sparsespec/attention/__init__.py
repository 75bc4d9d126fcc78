"""Attention backends: plan once a step, run once a layer."""
