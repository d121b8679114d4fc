"""A plan executed in simulated time: its traffic, its steps' times and what each phase holds. Imports no torch."""
