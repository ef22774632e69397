"""Metadata and weights: GGUF files, Hugging Face folders, configurations, geometry files."""
