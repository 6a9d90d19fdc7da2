"""The command-line tools: what is here, is it right, is it fast."""
