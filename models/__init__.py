"""The embedded tiny-code model pair, its corpus and the script that trains it."""
