"""Layers and losses that treat a sequence a few tokens at a time."""
