"""The machine below all processes of ours: folders, processes, and what the kernel says of them."""
