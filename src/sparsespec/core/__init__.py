"""Plain data that every layer shares. Imports nothing of the engine and no torch."""
