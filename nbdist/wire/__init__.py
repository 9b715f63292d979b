"""Everything that is sent between processes: messages, frames, and pieces of shared memory."""
