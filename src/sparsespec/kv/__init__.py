"""The KV cache: who owns which page, where a token's entries lie, and the memory itself."""
