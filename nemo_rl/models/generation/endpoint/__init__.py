"""An OpenAI-compatible endpoint over the run's router, which records every token of the sessions of agents."""
