"""Ways of training in which ranks do not add up their gradients in every step."""
