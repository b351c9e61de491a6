"""Text to token ids and back, with the chat templates that come with a vocabulary."""
