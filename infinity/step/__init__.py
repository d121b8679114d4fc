"""The optimizer step: what is decided, measured and updated, and in which order. Names no module of a model."""
