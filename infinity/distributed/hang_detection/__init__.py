"""Hang detection: find ranks that wait for each other without an end, say why, and end the job."""
