"""Several processes that quantize one model: who does what, and what they tell each other."""
