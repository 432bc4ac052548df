"""The Ray actors that draft, verify and route, and the pure logic they are made of."""
