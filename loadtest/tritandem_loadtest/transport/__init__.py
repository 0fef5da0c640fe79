"""How a request travels: one module a protocol. Knows nothing about when requests are due or what figures mean."""
