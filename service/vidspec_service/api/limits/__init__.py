"""Who may ask, how much at once, who is next and how long it may take."""
