"""Studies of accuracy on the shipped samples, each with the page that it writes."""
