"""The command-line tools: what they measure and print. Only the public API is used here."""
