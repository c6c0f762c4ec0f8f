"""From trained networks to checkpoints that mlx-lm loads, with their cards."""
