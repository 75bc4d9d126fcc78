"""The laboratory: every draft policy in one engine on equal terms, and what each accepts, reads and would gain on a GPU."""
