"""What a captured model is and what can be known about it: programs, captures, channel spaces, towers; torch alone."""
