"""One thread: the models are so small that a second one only waits, ten times longer than the work takes."""

import torch

torch.set_num_threads(1)
