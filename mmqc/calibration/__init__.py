"""Forwards of calibration data, block by block, and the statistics that they leave."""
