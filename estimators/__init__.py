"""Sizes a training run before it starts: the engine's own plan, for a model that is described and not built.

Imports no torch and no transformers; answers in well under a second for any size.
"""
