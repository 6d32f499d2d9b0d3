"""What is proposed, what still holds, and how much to propose."""
