"""What an agent is asked, what its turns do, and how its answers are judged."""
