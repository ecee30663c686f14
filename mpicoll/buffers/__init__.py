"""Buffer arguments of collectives: specifications, datatypes, blocks of vector collectives, reduction operations."""
