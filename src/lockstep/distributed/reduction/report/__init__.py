"""What the ranks tell each other in a round, and what follows from it."""
