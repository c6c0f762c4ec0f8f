"""Draft length policies on recorded texts: what records them, and what replays them."""
