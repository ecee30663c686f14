"""One call of a collective: check the arguments, choose the algorithm, run it."""
