"""Real processes, tiny models and data for tests."""
