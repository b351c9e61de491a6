"""``fastinfer router``: one address in front of several servers."""
