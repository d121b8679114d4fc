"""Other libraries' models and names: Hugging Face's folders, DeepSpeed's functions."""
