"""Python objects in collectives: encoding, records of fixed size, reduction, and the collectives made of these."""
