"""LightningModules: losses, schedules and logging around the plain networks."""
