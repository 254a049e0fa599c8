"""What several kernels need: facts about the device, launches, scales of rows, codes."""
