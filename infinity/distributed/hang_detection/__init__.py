"""Ranks that wait for each other without an end are found, told apart, and ended."""
