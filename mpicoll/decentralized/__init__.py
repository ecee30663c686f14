"""Training without servers: mailboxes between equal ranks."""
