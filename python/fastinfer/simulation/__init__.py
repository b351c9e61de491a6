"""``fastinfer simulate``: the engine's scheduler and block manager under a virtual clock, without a model."""
