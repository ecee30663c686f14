"""Models: sequences of layers over one flat vector of parameters."""
