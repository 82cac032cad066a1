"""An OpenAI-compatible server over `AsyncLLM`. Needs the extra `serve`; nothing here is imported by the rest."""
