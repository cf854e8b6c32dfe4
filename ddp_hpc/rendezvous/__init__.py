"""How ranks find rank 0 and exchange small messages: an authenticated key-value store."""
