"""Help where names of two sides meet: completion, what was meant, and who has a name."""
