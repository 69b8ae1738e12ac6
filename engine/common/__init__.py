"""What several parts share and is not about one of them: formats, small rules and facts."""
