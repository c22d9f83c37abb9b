"""Real Hugging Face configurations that the package carries."""
