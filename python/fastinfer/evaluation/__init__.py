"""How well a model predicts a text, and how two models differ on it."""
