"""The step loop around scheduler and runner, and what turns tokens into answers."""
