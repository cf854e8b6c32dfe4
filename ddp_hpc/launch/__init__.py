"""Launch commands for the current allocation or machine."""
