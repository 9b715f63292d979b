"""The head of a world on several machines: between the notebook and the agents."""
