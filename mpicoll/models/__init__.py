"""Models as rows of layers over one flat vector of parameters."""
