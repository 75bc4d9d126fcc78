"""Building blocks that models are made of."""
