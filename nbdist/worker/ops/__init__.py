"""What a task can ask of a worker besides running source, a file each."""
