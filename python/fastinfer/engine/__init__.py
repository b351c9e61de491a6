"""The runtime: each step of the engine schedules sequences, runs the model, samples tokens and updates requests."""
