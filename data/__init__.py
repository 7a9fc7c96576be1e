"""Training rows: generators of planning problems, and supervised data."""
