"""Other protocols than OpenAI's chat and text completions, over the same requests."""
