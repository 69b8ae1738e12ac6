"""Programs that people use, unchanged, each against one engine at the version it negotiates."""
