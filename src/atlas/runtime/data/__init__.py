"""Tokens on disk and the order in which training sees them. Knows numpy and files; neither torch nor the layout."""
