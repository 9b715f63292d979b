"""What crosses between processes: messages, frames, pickling, shared memory."""
