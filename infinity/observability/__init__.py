"""What a run shows of itself: where bytes are, what happened when, and figures of each step."""
