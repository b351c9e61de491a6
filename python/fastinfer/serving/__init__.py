"""From many callers to one engine: prompts become token ids, threads share steps, streams get their outputs."""
