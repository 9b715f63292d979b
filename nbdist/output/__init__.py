"""What ranks have said and how it looks: screen, transcript, layout and its writers; pure."""
