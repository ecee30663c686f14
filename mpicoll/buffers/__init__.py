"""Buffer arguments as memory: specifications, datatypes, blocks of vector collectives, reduction operations."""
