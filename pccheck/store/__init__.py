"""One store opened for writing: the life of its slots, the word, what is kept and what is freed."""
