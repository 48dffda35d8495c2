"""Plain torch networks and their frozen configurations, written for one device."""
