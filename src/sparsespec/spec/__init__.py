"""Draft policies: one file each."""
