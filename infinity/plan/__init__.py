"""Every decision, as a value: what exists, where it lives, in which order it moves. Imports no torch, no device."""
