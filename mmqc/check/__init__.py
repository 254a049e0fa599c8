"""What an engine will make of a checkpoint that lies on the disk, ours or another project's."""
