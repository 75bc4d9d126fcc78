"""Architectures: one file each, named after its Hugging Face model_type."""
