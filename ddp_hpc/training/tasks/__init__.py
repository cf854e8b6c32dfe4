"""Tasks: models with their loss and data, built in or the user's own."""
