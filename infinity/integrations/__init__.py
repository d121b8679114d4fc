"""Interfaces of other libraries: Hugging Face model folders and DeepSpeed's functions."""
