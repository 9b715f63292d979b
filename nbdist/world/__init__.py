"""The engine in the notebook's process: it starts the workers of a world and runs tasks on them."""
