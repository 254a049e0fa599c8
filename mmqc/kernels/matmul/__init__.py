"""Products of codes and of packed weights, with their epilogues."""
